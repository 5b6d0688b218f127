// In place of the SFT experiment: from random weights, on the same demonstrations.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.sft('greedy_jsd', (import '../methods/sft.jsonnet') + (import '../presets/greedy_jsd.jsonnet'))
