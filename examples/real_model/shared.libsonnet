// SmolLM2-135M-Instruct on sums of three digits, on two CPU cores: what GRPO and VinePPO share. They differ in their credit
// alone. `python scripts/pretrained_135m.py` makes the model's folder, `python examples/real_model/make_rows.py` the rows.
// Where the hub can be reached, the model may be named 'HuggingFaceTB/SmolLM2-135M-Instruct' instead.
(import 'engines/in_process.jsonnet') + {
  type: 'policy_iteration',
  directory: 'experiments/real_model',
  seed: 1,
  model: {
    type: 'pretrained',
    name_or_path: 'pretrained/SmolLM2-135M-Instruct',
    dtype: 'float32',
    attention: 'sdpa',
    chat: {},
  },
  context_length: 224,
  task: {
    type: 'rows',
    train: ['data/sums/train.jsonl'],
    validation: ['data/sums/validation.jsonl'],
    test: ['data/sums/test.jsonl'],
    routes: { math__sums: { type: 'numeric' } },
    demonstration_field: 'solution',
    steps: { type: 'lines' },
    stop: [],
  },
  rollout: { type: 'single_turn', samples: 8, temperature: 1, max_tokens: 40 },
  iterations: 8,
  problems_per_iteration: 8,
  checkpoints: { every: 8 },
  trainer: {
    learning_rate: 2e-5,
    schedule: { type: 'warmup', steps: 2 },
    minibatch_size: 32,
    layout: 'tree',  // the prompt that eight answers share is computed once
    tokens_per_micro_batch: 2048,
    objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2 },
  },
  evaluation: {
    every: 4,
    sets: [
      { split: 'validation', problems: 100, samples: 1, while_training: true },
      { split: 'test', problems: 100, samples: 1 },
    ],
  },
  plan: { prompt_tokens: 170, shared_prompt_tokens: 150, answer_tokens: 24 },  // all prompts begin with three solved sums
}
