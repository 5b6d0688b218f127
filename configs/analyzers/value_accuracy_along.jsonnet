// The same along training: every checkpoint, with fewer states of each.
{
  analyzers+: [
    { type: 'value_accuracy', name: 'value_accuracy_along', checkpoints: 'all', states: 48, prompts: 0 },
  ],
}
