// The same experiment as ppo.py, composed of treetune's parts.
(import '../../configs/quickstart/ppo.jsonnet')
+ (import 'small.libsonnet')
+ {
  iterations: 15,
  trainer+: { minibatch_size: 128, epochs: 2, advantage_normalisation: 'none' },
  credit+: { critic+: { value_clip: null } },
}
