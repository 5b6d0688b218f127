// KTO with the reference point 0, on the pairs of DPO.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('kto', import '../methods/kto.jsonnet')
