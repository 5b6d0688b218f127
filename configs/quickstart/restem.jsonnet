// RestEM.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.filtered('restem', import '../methods/restem.jsonnet')
