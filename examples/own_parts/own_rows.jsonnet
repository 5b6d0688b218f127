// GRPO on rows of one's own, with fields of one's own, and no code.
(import 'polIter_rho1bSft2_grpo_GSM8K.jsonnet') + {
  experiment_name: 'own_rows',
  task: {
    type: 'gsm8k',
    train: ['examples/own_parts/questions.jsonl'],  // from the working directory on
    test: ['examples/own_parts/questions.jsonl'],
    validation_size: 1,
    problem_field: 'text',
    gold_field: 'solution',
    keep: ['level'],
    prompt: 'Question: {problem}\nAnswer:',
  },
  evaluation+: { sets: [{ split: 'test', samples: 4 }] },
  // Four rows are few: an iteration takes all that are not held out, and one step.
  problems_per_iteration: null,
  trainer+: { minibatch_size: null },
}
