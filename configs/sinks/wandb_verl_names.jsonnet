// Weights & Biases with names that dashboards of verl have, in addition to those of this project, and a table of
// answers every ten iterations. The names assume an evaluation set called test.
{
  sinks+: [{
    type: 'wandb',
    answers_every: 10,
    further_names: {
      'test/score': 'evaluation/test/pass_at_1',
      'test/avg_response_length': 'evaluation/test/mean_tokens',
      'train/score': 'episodes/score',
      'actor/loss': 'train/loss',
      'actor/entropy': 'train/entropy',
    },
  }],
}
