// GRPO with the function of reward.py as the reward. It starts from the weights that sft.jsonnet trains.
(import 'quickstart/grpo.jsonnet') + (import 'task.libsonnet') + {
  experiment_name: 'own_data/grpo',
  model+: { name_or_path: $.directory + '/own_data/sft/checkpoints/last/policy' },
  rollout+: { max_tokens: 8 },
  trainer+: { learning_rate: 1e-3 },
}
