// GRPO and VinePPO from the chat model's weights, three seeds each, measured on the same held-out sums.
local method(name, seconds) = {
  configs: ['examples/real_model/%s.jsonnet' % name],
  seconds_per_iteration: seconds,
  estimated_from: 'seen on two cores',
};
{
  type: 'reproduction',
  name: 'real_model_table',
  title: 'GRPO and VinePPO on SmolLM2-135M-Instruct',
  directory: 'experiments/real_model',
  seeds: [1, 2, 3],
  baseline: 'GRPO',
  experiments: { grpo: method('grpo', 45), vineppo: method('vineppo', 80) },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  panels: [
    { name: 'reward of 64 sampled answers', metric: 'episodes/reward' },
    { name: 'answers cut off at 40 tokens', metric: 'episodes/unfinished' },
    { name: 'entropy, nats per token', metric: 'train/entropy' },
    { name: 'KL to the start model, nats per token', metric: 'train/kl' },
  ],
  rows: [
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'VinePPO', experiment: 'vineppo' },
  ],
}
