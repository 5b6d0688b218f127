// The start model of all others: from random weights, on demonstrations of a teacher who makes mistakes.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.sft('sft', import '../methods/sft.jsonnet')
