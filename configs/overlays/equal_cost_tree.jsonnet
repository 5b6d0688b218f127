// Eight answers to a problem, each continued in two ways from the end of its first step; siblings give the values.
(import '../methods/tree.jsonnet') + {
  rollout+: { samples: 8, branching+: { ways: [2] } },
}
