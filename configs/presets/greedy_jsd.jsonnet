// SPO, section 4.4: a corpus instead of answers. Its next token shall be the first choice; nothing is asked
// where it is. For experiments whose rollout is demonstrations.
(import 'preset.libsonnet')('greedy_jsd', 'demonstrations')
+ {
  credit: { type: 'none' },
  selection: { type: 'all' },
  trainer+: {
    objective: { type: 'spo', target: 'rank', divergence: 'jsd', loss_on: 'all', normalise_by: 'batch' },
  },
}
