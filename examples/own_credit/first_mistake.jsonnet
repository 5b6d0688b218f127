// The quickstart with a credit of one's own.
(import 'quickstart/grpo.jsonnet') + (import '../laptop.libsonnet') + {
  imports: ['first_mistake'],
  experiment_name: 'own_credit/first_mistake',
  credit: { type: 'first_mistake' },
}
