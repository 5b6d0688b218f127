// SmolLM2-135M-Instruct on word problems of three steps, on two CPU cores. `python scripts/pretrained_135m.py` makes the
// model's folder, `python examples/real_model/make_rows.py` the rows. Where the hub can be reached, the model may be named
// 'HuggingFaceTB/SmolLM2-135M-Instruct' instead.
(import 'engines/vllm_cpu.jsonnet') + {
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
  context_length: 192,
  engines+: { policy+: { max_num_seqs: 64, max_num_batched_tokens: 4096, prefix_caching: true } },
  task: {
    type: 'gsm8k',
    train: ['data/shop/train.jsonl'],
    test: ['data/shop/test.jsonl'],
    validation_size: 100,
    prompt: '{problem}',
    grader: { type: 'numeric' },
    steps: { type: 'lines' },
  },
  plan: { prompt_tokens: 62, answer_tokens: 35 },
}
