// DPO-positive.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('dpo_positive', import '../methods/dpo_positive.jsonnet')
+ { trainer+: { objective+: { positive_penalty: 5 } } }
