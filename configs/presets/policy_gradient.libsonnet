// What the group-relative presets share; each goes on the right of an experiment that says task, model,
// rollout and optimiser.
{
  selection: { type: 'all' },
  trainer+: { objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2 }, advantage_normalisation: 'none' },
}
