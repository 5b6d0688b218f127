// OPSD with a teacher who is more careful with the answer in its prompt, and never copies it: what of the result of
// self_distillation.jsonnet is due to copying? The comparison with GRPO was declared before any of these seeds was run.
(import 'self_distillation.libsonnet')(
  [1, 2],
  [
    { name: 'GRPO', config: 'grpo_honest' },
    { name: 'OPSD, the start model teaches', config: 'opsd_start_teacher_honest' },
  ],
  {
    name: 'self_distillation_honest',
    title: 'Self-distillation with a teacher who does not copy the answer: 3,072 sampled answers',
    baseline: 'GRPO',
  },
  start='start_honest',
)
