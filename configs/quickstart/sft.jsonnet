// The start model of all others: from random weights, on demonstrations of a teacher who slips.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.sft('sft', import '../methods/sft.jsonnet')
