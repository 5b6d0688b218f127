// The same experiment with GRPO's credit, r - mean(r), to compare.
(import 'first_mistake.jsonnet') + { experiment_name: 'own_credit/grpo', imports: [], credit: { type: 'group', std: false } }
