// The whole loop in seconds. A model of random weights never adds right, so unfinished answers earn the
// reward: advantages that are not zero, without anything to be learnt first.
{
  type: 'policy_iteration',
  experiment_name: 'small',
  seed: 1,
  task: { type: 'addition_chain', count: 3, digits: 2, train_size: 200, validation_size: 20, test_size: 20 },
  model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96, context_length: 64 },
  context_length: 64,
  engines+: {
    policy: {
      type: 'vllm',
      dtype: 'float32',
      max_num_seqs: 64,
      max_num_batched_tokens: 2048,
      max_concurrency: 1,  // one request after the other: a phase lasts, and its journal grows meanwhile
      prefix_caching: false,
    },
  },
  rollout: { type: 'single_turn', samples: 2, max_tokens: 32, unfinished_reward: 1.0 },
  credit: { type: 'monte_carlo', samples: 1 },
  selection: { type: 'all' },
  trainer: {
    objective: { type: 'ppo', kl_coef: 0.01 },
    learning_rate: 1e-3,
    adam_eps: 1e-4,  // Adam divides by it where a gradient is 0 up to rounding
    advantage_normalisation: 'whiten',
    minibatch_size: 8,
    epochs: 4,  // training lasts long enough to be struck in
  },
  iterations: 4,
  problems_per_iteration: 8,
  checkpoints: { every: 2, keep_every: 2 },
  rank_deadline: 120,
}
