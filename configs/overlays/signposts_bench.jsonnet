// For the right of GRPO on signposts: a run with the rate and the KL of the tables of training, and credit methods on 8,192 answers at its
// start, after two thirds and at its end, against true values in which both ways are taken wherever something is decided. Without the methods
// that sample by turns: all others share the continuations of K = 9.
(import '../analyzers/credit_bench.jsonnet') + {
  experiment_name+: '_bench',
  problems_per_iteration: 32,
  iterations: 60,
  trainer+: {
    learning_rate: 3e-4,
    minibatch_size: 16,
    objective+: { kl_coef: 0.05, kl_estimator: 'k3', kl_placement: 'loss' },
    advantage_normalisation: 'none',
  },
  checkpoints: { every: 20, keep_every: 20 },
  evaluation+: { every: null, sets: [{ split: 'test', problems: 128, samples: 1 }] },
  analyzers: [
    one {
      checkpoints: [0, 40, 60],
      problems: 1024,
      truth: { type: 'in_process', samples: 8 },
      methods: {
        [name]: one.methods[name]
        for name in std.objectFields(one.methods)
        if !std.startsWith(name, 'sequential')
      },
    }
    for one in super.analyzers
  ],
}
