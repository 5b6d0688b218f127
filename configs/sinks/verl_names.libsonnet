// Names that dashboards of verl and RL2 have, and the metrics of this project that they show. They assume an
// evaluation set called test.
{
  'test/score': 'evaluation/test/pass_at_1',
  'test/avg_response_length': 'evaluation/test/mean_tokens',
  'train/score': 'episodes/score',
  'actor/loss': 'train/loss',
  'actor/entropy': 'train/entropy',
}
