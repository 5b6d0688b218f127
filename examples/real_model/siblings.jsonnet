// Siblings: the value at the end of a line is the mean reward of the problem's other answers that begin with the same lines.
(import 'shared.libsonnet') + (import 'methods/vineppo.jsonnet')
+ { experiment_name: 'siblings', credit+: { values: { type: 'siblings' } } }
