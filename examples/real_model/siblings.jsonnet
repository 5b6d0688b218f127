// The credit `siblings`: a state is worth the mean reward of the other sampled answers that pass through it. It samples nothing more.
(import 'shared.libsonnet') + (import 'methods/ppo_group_credit.jsonnet') + (import 'credit/siblings.jsonnet') + { experiment_name: 'siblings' }
