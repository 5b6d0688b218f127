// DPO on 64 answers to each of 200 problems.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('dpo', import '../methods/dpo.jsonnet')
