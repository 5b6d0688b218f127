// GRPO on games of Nim. The base is another game, with a tiny model that has random weights.
(import 'multi_turn/guess_number.jsonnet') + {
  imports: ['nim'],  // the file nim.py, next to this one
  directory: 'experiments/examples',
  experiment_name: 'own_environment/nim',
  engines: { policy: { type: 'in_process' } },
  task+: { environment: { type: 'nim' } },
  rollout+: { max_turns: 6, max_tokens: 30 },
}
