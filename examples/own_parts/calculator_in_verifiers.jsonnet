// calculator_grpo.jsonnet with the calculator as an environment of verifiers. Install verifiers in a second Python:
//     python -m venv .verifiers && .verifiers/bin/pip install verifiers==0.1.14
(import 'calculator_grpo.jsonnet') + {
  experiment_name: 'calculator/in_verifiers',
  imports: ['verifiers_environments'],
  task: {
    type: 'environment',
    environment: {
      type: 'verifiers',
      path: 'calculator_env.py',
      python: '.verifiers/bin/python',
      arguments: { rows: 2300 },
      format: 'hermes',
    },
    train_size: 2000,
    validation_size: 100,
    test_size: 200,
  },
  rollout+: { environment: null },
}
