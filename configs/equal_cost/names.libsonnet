// Further configurations of this folder, each under its name: configs/equal_cost/NAME.jsonnet is the field NAME.
{
  // One choice decides (lib/decisive.libsonnet says where): GRPO from the start model. Another method goes on its right.
  alone: (import '../lib/decisive.libsonnet')('alone').on_policy,
  first: (import '../lib/decisive.libsonnet')('first').on_policy,
  last: (import '../lib/decisive.libsonnet')('last').on_policy,
  long: (import '../lib/decisive.libsonnet')('long').on_policy,
  longest: (import '../lib/decisive.libsonnet')('longest').on_policy,

  // What all methods start from.
  alone_start: (import '../lib/decisive.libsonnet')('alone').start,
  long_start: (import '../lib/decisive.libsonnet')('long').start,
  longest_start: (import '../lib/decisive.libsonnet')('longest').start,
  start: (import '../lib/decisive.libsonnet')('first').start,

  // Signposts with wandering before those that decide: GRPO from the start model. Another method goes on its right.
  distraction: (import '../lib/equal_cost.libsonnet')('distraction').on_policy,

  // Signposts with wandering before those that decide: what all methods start from.
  distraction_start: (import '../lib/equal_cost.libsonnet')('distraction').start,

  // Three times the correct ones of a third of the budget. Validation says how many epochs are good.
  filtered: {
    problems_per_iteration: 70,
    trainer+: {
      schedule: { type: 'warmup', steps: 10, decay: 'linear' },
      minibatch_size: 32,
      epochs: 6,
    },
    choose_checkpoint: { set: 'validation', rule: 'best' },
    evaluation+: { every: 1 },
  },

  // One iteration that is the whole budget: 64 answers to each problem, at most 16 pairs of a correct one and a wrong one to a
  // problem. Validation says how many epochs are good.
  preferences: {
    rollout+: { samples: 64 },
    problems_per_iteration: 26,
    iterations: 1,
    selection+: { max_pairs_per_problem: 16 },
    trainer+: {
      objective+: { beta: 0.3, positive_penalty: 5 },
      schedule: { type: 'warmup', steps: 10 },
      minibatch_size: 64,
      epochs: 4,
      measure_kl: true,
    },
    choose_checkpoint: { set: 'validation', rule: 'best' },
  },

  // Signposts that must all be right: GRPO from the start model. Another method goes on its right.
  slips: (import '../lib/equal_cost.libsonnet')('slips').on_policy,

  // Signposts that must all be right: what all methods start from.
  slips_start: (import '../lib/equal_cost.libsonnet')('slips').start,

  // Eight answers to a problem, each of which goes on in two ways from its first step's end, and what siblings say of each other.
  tree: (import '../methods/tree.jsonnet') + {
    rollout+: { samples: 8, branching+: { ways: [2] } },
  },
}
