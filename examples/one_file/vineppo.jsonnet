// The same experiment as vineppo.py, composed of treetune's parts.
(import '../../configs/quickstart/vineppo.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 20, problems_per_iteration: 32, trainer+: { learning_rate: 1e-3 } }
