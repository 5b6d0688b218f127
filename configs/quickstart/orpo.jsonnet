// ORPO, on the pairs of DPO.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('orpo', import '../methods/orpo.jsonnet')
+ { trainer+: { objective+: { beta: 0.1 } } }
