// The three sets on which the paper measures models of GSM8K: 16 answers to a problem.
local set = import 'paper_set.libsonnet';
{
  evaluation: {
    seed: 2746318213,
    sets: [
      set { name: 'gsm8k_test', split: 'test' },
      set { name: 'gsm8k_validation', split: 'validation' },
      set { name: 'gsm8k_train', split: 'train', problems: 373, choose: 'random' },
    ],
  },
}
