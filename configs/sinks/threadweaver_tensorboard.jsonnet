// TensorBoard with the metrics' names of ThreadWeaver's README in addition to those of this project.
{
  sinks+: [{
    type: 'tensorboard',
    further_names: {
      'reward/mean': 'episodes/reward',
      'metrics/correct_rate': 'episodes/correct',
      'metrics/acceleration_ratio': 'threads/acceleration_ratio',
      'metrics/parallel_usage': 'threads/with_parallel',
      'loss/policy_loss': 'train/policy_loss',
      'loss/value_loss': 'critic/loss',
    },
  }],
}
