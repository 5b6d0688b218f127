// The quickstart's GRPO with the credit of first_mistake.py.
(import 'quickstart/grpo.jsonnet') + (import '../laptop.libsonnet') + {
  imports: ['first_mistake'],  // the file first_mistake.py, next to this one
  experiment_name: 'own_credit/first_mistake',
  credit: { type: 'first_mistake' },
}
