// For the right of a run on signposts: credit methods on 1,024 answers at its start, middle and end, against true values in
// which both ways are taken wherever something is decided. Without those that sample by turns: all others share the
// continuations of K = 9.
(import '../analyzers/credit_bench.jsonnet') + {
  analyzers: [
    one {
      checkpoints: [0, 10, 20],
      problems: 128,
      truth: { type: 'in_process', samples: 8 },
      gradient_batch: 64,
      methods: { [name]: one.methods[name] for name in std.objectFields(one.methods) if !std.startsWith(name, 'sequential') },
    }
    for one in super.analyzers
  ],
}
