// RestEM on the quickstart's task: in each iteration, the start model learns the policy's own correct answers.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.filtered('restem', import '../methods/restem.jsonnet')
