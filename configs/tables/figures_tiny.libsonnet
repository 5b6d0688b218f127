// What the tiny tables of the VinePPO paper's figures share: one embedded task (six choices, all of which must be right),
// the same methods, and one directory, so that what one table has run, the others read.
local sft = 'signposts/slips/sft';
{
  methods: {
    ppo: { name: 'PPO', configs: ['configs/methods/ppo.jsonnet'], more: '{ credit+: { critic+: { learning_rate: 1e-3 } } }' },
    grpo: { name: 'GRPO', configs: ['configs/methods/ppo_group_credit.jsonnet'] },
    vineppo_1: { name: 'VinePPO, K = 1', configs: [], more: '{ credit+: { samples: 1 } }' },
    vineppo_3: { name: 'VinePPO, K = 3', configs: [], more: '{ credit+: { samples: 3 } }' },
    vineppo_9: { name: 'VinePPO, K = 9', configs: [], more: '{ credit+: { samples: 9 } }' },
  },

  // Experiments by the methods' names, and the supervised one that all begin with.
  experiments(methods, analyzers=[]):: {
    sft: {
      configs: ['configs/signposts/slips_sft.jsonnet'],
      seconds_per_iteration: 60,
      estimated_from: 'a guess for one of two cores',
    },
  } + {
    [method]: {
      local of = $.methods[method],
      configs: ['configs/signposts/slips_vineppo.jsonnet'] + of.configs + analyzers,
      overrides: [
        "{ experiment_name: 'signposts/slips/%s', checkpoints: { every: 4, keep_every: 4 } }" % method,
        "{ iterations: 20, evaluation+: { every: 4 } }",
      ] + if 'more' in of then [of.more] else [],
      needs: ['sft'],
      seconds_per_iteration: 10,
      estimated_from: 'a guess for one of two cores',
    }
    for method in methods
  },

  table: {
    type: 'reproduction',
    directory: 'experiments/figures_tiny',
    seeds: [1, 2, 3],
  },
}
