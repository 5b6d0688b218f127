// The settings that the group-relative presets share. Each preset is appended to an experiment that sets task, model,
// rollout and optimiser.
{
  selection: { type: 'all' },
  trainer+: { objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2 }, advantage_normalisation: 'none' },
}
