// The small experiment in turns, with an environment that misbehaves on four of ten levels.
(import '../../tests/support/small.jsonnet') + {
  imports: ['unruly_environment'],
  task: { type: 'environment', environment: { type: 'unruly' }, train_size: 40, validation_size: 10, test_size: 10 },
  rollout: {
    type: 'multi_turn',
    samples: 2,
    max_tokens: 24,
    max_turns: 4,
    turn_tokens: 1,
    observation_characters: 8,
  },
  credit: { type: 'monte_carlo', samples: 1, states: { type: 'turns' } },
  problems_per_iteration: 12,
}
