// BranPO's branching in the tail: each answer is continued from its last line in two ways.
(import '../lib/hinted_sums.libsonnet').policy_gradient(
  'tree_last_states',
  (import '../credit/tree.jsonnet') + (import '../rollouts/tree_last_states.jsonnet'),
)
