// DPO-positive on the quickstart's task: pairs of a correct and a wrong answer to the same problem.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.preferences('dpo_positive', import '../methods/dpo_positive.jsonnet')
+ { trainer+: { objective+: { positive_penalty: 5 } } }
