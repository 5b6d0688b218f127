// The experiment of sft.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/sft.jsonnet')
+ (import 'small.libsonnet')
+ {
  model+: { layers: 2, hidden_size: 64, heads: 2, intermediate_size: 192 },
  trainer+: { learning_rate: 3e-3, minibatch_size: 32 },
}
