// The same experiment as grpo.py, composed of treetune's parts.
(import '../../configs/quickstart/grpo_as_published.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 15, trainer+: { minibatch_size: 128, epochs: 2 } }
