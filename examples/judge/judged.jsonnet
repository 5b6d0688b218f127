// GRPO with the verdict of a language model as the reward.
(import 'quickstart/grpo.jsonnet') + (import '../laptop.libsonnet') + {
  experiment_name: 'judge/judged',
  iterations: 5,
  checkpoints: { every: 5 },
  task+: { grader: {
    type: 'judge',
    endpoint: { base_url: 'http://127.0.0.1:8123/v1', model: 'stand-in', temperature: 0, max_tokens: 256 },
    rule: { type: 'final_answer', marker: '#' },  // judge/agreement is how often this rule gives the same verdict
  } },
}
