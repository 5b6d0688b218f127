// GRPO on rows of your own. No Python is needed.
(import 'polIter_rho1bSft2_grpo_GSM8K.jsonnet') + {
  experiment_name: 'own_rows',
  task: {
    type: 'gsm8k',
    train: ['examples/own_parts/questions.jsonl'],  // relative to the working directory
    test: ['examples/own_parts/questions.jsonl'],
    validation_size: 1,
    problem_field: 'text',
    gold_field: 'solution',
    keep: ['level'],  // a further field, for graders and metrics
    prompt: 'Question: {problem}\nAnswer:',
  },
  evaluation+: { sets: [{ split: 'test', samples: 4 }] },
  // There are only four rows: an iteration takes all but the held-out one, and makes one step.
  problems_per_iteration: null,
  trainer+: { minibatch_size: null },
}
