// The seven names of ThreadWeaver's README, and the metrics of this project that they show.
{
  'reward/mean': 'episodes/reward',
  'reward/std': 'episodes/reward_std',
  'metrics/correct_rate': 'episodes/correct',
  'metrics/acceleration_ratio': 'threads/acceleration_ratio',
  'metrics/parallel_usage': 'threads/with_parallel',
  'loss/policy_loss': 'train/policy_loss',
  'loss/value_loss': 'critic/loss',
}
