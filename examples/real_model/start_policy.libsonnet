// To append to critic.jsonnet: the policy stays the start model, so that the critic learns the start model's values.
{
  experiment_name: 'critic_of_the_start_model',
  // Only weights that are exactly 0 change at this rate, by less than 1e-18. A learning rate of 0 is refused.
  trainer+: { learning_rate: 1e-20 },
  evaluation+: { every: 8 },
}
