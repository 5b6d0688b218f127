// Eight answers to a problem, each of which goes on in two ways from its first step's end, and what siblings say of each other.
(import '../methods/tree.jsonnet') + {
  rollout+: { samples: 8, branching+: { ways: [2] } },
}
