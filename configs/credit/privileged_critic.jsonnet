// treetune's own: PPO with a critic whose prompt shows it the reference answer, which the policy doesn't see.
{ credit: { type: 'gae', critic: { template: '{prompt}\n\nReference answer: {gold}\n' } } }
