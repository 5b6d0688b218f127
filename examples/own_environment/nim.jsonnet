// A tiny model plays Nim, from random weights.
(import 'multi_turn/guess_number.jsonnet') + {
  imports: ['nim'],
  directory: 'experiments/examples',
  experiment_name: 'own_environment/nim',
  engines: { policy: { type: 'in_process' } },
  task+: { environment: { type: 'nim' } },
  rollout+: { max_turns: 6, max_tokens: 30 },
}
