// The experiment of vineppo.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/vineppo.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 20, problems_per_iteration: 32, trainer+: { learning_rate: 1e-3 } }
