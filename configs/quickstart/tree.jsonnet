// Four answers to a problem, each of which branches in two at the ends of its first two steps: 16 answers for about as
// many sampled tokens as eight from the prompt.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('tree', import '../methods/tree.jsonnet')
