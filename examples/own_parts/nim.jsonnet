// The tiny model plays a game of one's own.
(import 'multi_turn/guess_number.jsonnet') + {
  imports: ['my_package.nim'],
  experiment_name: 'multi_turn/own_nim',
  task+: { environment: { type: 'nim' } },
  rollout+: { max_turns: 6, max_tokens: 30 },
}
