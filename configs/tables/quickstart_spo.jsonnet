// Learning from correct paths compared with Dr. GRPO, on sums of four two-digit numbers, three seeds each: accuracy,
// sampled and greedy, and the course of entropy and length in training. All train on 25 × 64 problems × 8 answers.
local greedy = 'configs/evaluations/quickstart_greedy.jsonnet';
local after_sft(name) = {
  configs: ['configs/quickstart/%s.jsonnet' % name, greedy],
  needs: ['sft'],
  seconds_per_iteration: 6,
  estimated_from: 'what GRPO takes on two cores',
};
{
  type: 'reproduction',
  name: 'quickstart_spo',
  title: 'Correct paths on the embedded task, 12,800 sampled answers each',
  directory: 'experiments/quickstart_spo',
  seeds: [1, 2, 3],
  baseline: 'SFT',
  experiments: {
    sft: {
      configs: ['configs/quickstart/sft.jsonnet', greedy],
      seconds_per_iteration: 25,
      estimated_from: 'seen on two cores',
    },
  } + { [name]: after_sft(name) for name in [
    'dr_grpo',
    'spo_3_1',
    'spo_3_2',
    'spo_3_3',
    'spo_rank_jsd',
    'spo_entropy_0.1',
  ] },
  columns: [
    { name: 'test pass@1, sampled', evaluation: 'test' },
    { name: 'test pass@1, greedy', evaluation: 'test_greedy' },
  ],
  rows: [
    { name: 'SFT', experiment: 'sft' },
    { name: 'Dr. GRPO', experiment: 'dr_grpo' },
    { name: 'SPO 3.1', experiment: 'spo_3_1' },
    { name: 'SPO 3.2', experiment: 'spo_3_2' },
    { name: 'SPO 3.3', experiment: 'spo_3_3' },
    { name: 'SPO rank-JSD', experiment: 'spo_rank_jsd' },
    { name: 'SPO 3.2, entropy −0.1', experiment: 'spo_entropy_0.1' },
  ],
  panels: [
    { name: 'validation pass@1, sampled', evaluation: 'validation' },
    { name: 'validation pass@1, greedy', evaluation: 'validation_greedy' },
    { name: 'entropy (nats per trained token)', metric: 'train/entropy' },
    { name: 'length of sampled answers (tokens)', metric: 'episodes/response_tokens' },
  ],
  notes: [
    'Methods start from the weights of SFT. Sampled: 4 answers at temperature 1; greedy: one at temperature 0.',
    'SPO has a quarter of Dr. GRPO’s learning rate; at the same rate it fell faster (seed 1).',
    'Entropy is that of the tokens that are trained on: of all answers in Dr. GRPO, of correct ones in SPO.',
  ],
}
