// A critic for credit_table_critic.jsonnet, trained next to the policy. The policy learns from siblings, whose baselines the critic
// improves as far as it is right: a critic that still knows nothing does no harm.
(import 'shared.libsonnet') + (import 'methods/ppo_group_credit.jsonnet') + {
  experiment_name: 'critic',
  credit: {
    type: 'monte_carlo',
    samples: 1,
    values: {
      type: 'control_variate',
      over: { type: 'siblings' },
      // Values are means over bins between 0 and 1, so that a new head is never far off.
      critic: { loss: { type: 'hl_gauss' }, learning_rate: 5e-5 },
    },
  },
}
