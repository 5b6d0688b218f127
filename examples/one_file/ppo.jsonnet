// The experiment of ppo.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/ppo.jsonnet')
+ (import 'small.libsonnet')
+ {
  iterations: 15,
  trainer+: { minibatch_size: 128, epochs: 2, advantage_normalisation: 'none' },
  credit+: { critic+: { value_clip: null } },  // the critic's loss is the plain squared error
}
