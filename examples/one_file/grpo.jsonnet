// The experiment of grpo.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/grpo_as_published.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 15, trainer+: { minibatch_size: 128, epochs: 2 } }
