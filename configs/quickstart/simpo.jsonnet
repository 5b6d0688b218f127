// SimPO, on the pairs of DPO.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('simpo', import '../methods/simpo.jsonnet')
+ { trainer+: { objective+: { beta: 2.0 } } }
