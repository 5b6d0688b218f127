// For the right of GRPO on signposts: a short run whose policies are far apart, and credit methods on 8,192 answers (4,096 where more is decided) at its
// start, middle and end, against true values in which both ways are taken wherever something is decided. Without the methods
// that sample by turns: all others share the continuations of K = 9.
(import '../analyzers/credit_bench.jsonnet') + {
  experiment_name+: '_bench',
  problems_per_iteration: 32,
  iterations: 30,
  trainer+: { learning_rate: 1e-3 },
  checkpoints: { every: 15, keep_every: 15 },
  evaluation+: { every: null, sets: [{ split: 'test', problems: 128, samples: 1 }] },
  analyzers: [
    one {
      checkpoints: [0, 15, 30],
      // Others than wandering decide at several times as many steps, and each is continued.
      problems: if std.length(std.findSubstr('wandering', $.experiment_name)) > 0 then 1024 else 512,
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
