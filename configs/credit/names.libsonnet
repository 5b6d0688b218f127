// Further configurations of this folder, each under its name: configs/credit/NAME.jsonnet is the field NAME.
(import 'literature.libsonnet') + {
  // Three continuations of each state, held against a baseline that leans on the run's critic as far as that is right: unbiased.
  control_variate_3: { credit: { type: 'monte_carlo', samples: 3, values: { type: 'control_variate' } } },

  // VinePPO's with three continuations a state.
  continuations_3: { credit: { type: 'monte_carlo', samples: 3 } },

  // Step advantages from the run's own critic, without continuations: biased by the critic's errors.
  critic_values: { credit: { type: 'monte_carlo', values: { type: 'critic' } } },

  // Three continuations of each state, each value seen from one side along the answer: smoothing without its bias.
  filtered_3: { credit: { type: 'monte_carlo', samples: 3, values: { type: 'filtered' } } },

  // GRPO: reward less the group's mean, over its standard deviation.
  group: { credit: { type: 'group', std: true } },

  // Dr.GRPO: reward less the group's mean.
  group_mean: { credit: { type: 'group', std: false } },

  // RLOO: reward less the mean of the other answers.
  rloo: { credit: { type: 'rloo' } },

  // What the other answers through a state earned (TEMPO's values): nothing is sampled for it.
  siblings: { credit: { type: 'monte_carlo', values: { type: 'siblings' } } },

  // What the other answers through a state earned, topped up with continuations to one, and to three.
  topped_up_1: { credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } },
  topped_up_3: { credit: { type: 'monte_carlo', samples: 3, values: { type: 'topped_up' } } },

  // A branch's value less that of its siblings, weighted so that the expected gradient is that of independent answers.
  tree: { credit: { type: 'tree', advantage: 'leave_one_out', weight: 'reach' } },
}
