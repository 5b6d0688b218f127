// What the tables of the VinePPO paper (Kazemnejad et al., arXiv:2410.01679) share: its experiments, each from
// start weights that the SFT experiment makes. (Drop `own_start` to start from the paper's published ones.)
local models = {
  rho: { name: 'Rho-1.1B', sft: 'sft_rho1b', start: 'rho1bSft2' },
  deepseek: { name: 'DeepSeekMath-7B', sft: 'sft_deepseek7b', start: 'deepseekSft2' },
};
local own_start(sft) =
  "{ model+: { name_or_path: $.directory + '/%s/checkpoints/last/policy' } }" % sft;
// Seconds per iteration that others saw on one H100 for Rho on MATH.
local seen = { ppo: 90, vineppo: 237 };

{
  models: models,
  tasks: ['GSM8K', 'MATH'],
  methods: { restem: 'RestEM', dpo_positive: 'DPO+', ppo: 'PPO', grpo: 'GRPO', rloo: 'RLOO', vineppo: 'VinePPO' },

  sft(model, task):: '%s_%s_sft' % [model, task],
  experiment(model, task, method):: '%s_%s_%s' % [model, task, method],
  column(model, task):: '%s %s' % [task, models[model].name],

  // The experiments of some methods on one task, by the names that the tables use, and their SFT.
  experiments(model, task, methods, more_configs=[])::
    local sft = '%s_%s' % [models[model].sft, task];
    {
      [$.sft(model, task)]: { configs: ['configs/%s.jsonnet' % sft] },
    } + {
      [$.experiment(model, task, method)]: {
        configs: ['configs/polIter_%s_%s_%s.jsonnet' % [models[model].start, method, task]] + more_configs,
        overrides: [own_start(sft)],
        needs: [$.sft(model, task)],
      } + if model == 'rho' && task == 'MATH' && method in seen then {
        seconds_per_iteration: seen[method],
        estimated_from: 'on one H100 (CASPO, a descendant)',
      } else {}
      for method in methods
    },

  // A further experiment: another one with more files and overrides appended, and a name of its own.
  variant(experiment, override, ending):: experiment {
    overrides+: [override, "{ experiment_name+: '%s' }" % ending],
  },

  table: {
    type: 'reproduction',
    // The tables have one directory: what one has run, the others read.
    directory: 'experiments/vineppo_paper',
    seeds: [1, 2, 3],
  },
}
