// The same with GRPO's credit, to compare.
(import 'first_mistake.jsonnet') + { experiment_name: 'own_credit/grpo', imports: [], credit: { type: 'group', std: false } }
