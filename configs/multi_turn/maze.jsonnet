// Two gems in a maze of 4 × 4 cells, one step a turn, from random weights, by GRPO.
(import '../lib/turns.libsonnet')(
  'maze',
  { type: 'maze', size: 4, gems: 2, steps: 12 },
  { max_turns: 12, max_tokens: 110, observation_format: '{observation}\n' },
)
