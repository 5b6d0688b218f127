// DPO.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('dpo', import '../methods/dpo.jsonnet')
