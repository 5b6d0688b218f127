// To append to an experiment of this folder: sums of four digits, whose answers have three additions.
{
  directory: 'experiments/real_model_four_digits',
  context_length: 288,
  task+: {
    train: ['data/sums_of_four/train.jsonl'],
    validation: ['data/sums_of_four/validation.jsonl'],
    test: ['data/sums_of_four/test.jsonl'],
  },
  rollout+: { max_tokens: 56 },
  plan: { prompt_tokens: 210, shared_prompt_tokens: 190, answer_tokens: 32 },
}
