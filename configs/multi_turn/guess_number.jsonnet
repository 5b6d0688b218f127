// A number from 0 to 9 in four guesses, from random weights, by GRPO. (Halving finds each; knowing nothing, 4 of 10.)
(import '../lib/turns.libsonnet')(
  'guess_number',
  { type: 'guess_number', most: 9, guesses: 4 },
  { max_turns: 4, max_tokens: 20, observation_format: '{observation}\n' },
)
