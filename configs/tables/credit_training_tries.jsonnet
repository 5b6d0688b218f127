// The tries, on a seed that no table has, from which the tables of credit_training took learning rates and batches. 'last' and
// 'alone' in the place of 'first': the tasks on which true advantages were less than ten points above GRPO, and so were left.
(import 'credit_training.libsonnet')(
  'first',
  [101],
  { [method]: ['often', 'oftener', 'fast'] for method in ['ceiling', 'grpo', 'siblings', 'vineppo_1', 'vineppo_3', 'tree'] },
  'Tries of rates and batches',
  { name: 'credit_training_tries' },
)
