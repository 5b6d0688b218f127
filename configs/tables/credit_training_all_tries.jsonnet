// The tries, on a seed that no table has, from which the tables of eight choices that must all be right take learning rates and
// batches.
(import 'credit_training.libsonnet')(
  'all',
  [101],
  { [method]: ['often', 'oftener', 'fast'] for method in ['ceiling', 'grpo', 'siblings', 'vineppo_1', 'vineppo_3'] },
  'Tries of rates and batches where eight choices must all be right',
  { name: 'credit_training_all_tries' },
)
