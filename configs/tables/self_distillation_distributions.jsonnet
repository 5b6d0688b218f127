// Self-distillation on whole distributions, and with a moving teacher, compared with the sampled-token form: 3,072 sampled
// answers and 96 optimizer steps each, from the start model of self_distillation.jsonnet and on its seeds. Declared before any
// of these runs; the learning rate is that of the other table, and nothing was tuned.
(import 'self_distillation.libsonnet')(
  [1, 2, 3],
  [
    { name: 'OPSD, sampled tokens', config: 'opsd_start_teacher' },
    { name: 'OPSD, whole distributions', config: 'opsd_whole' },
    { name: 'OPSD, whole distributions, the policy teaches', config: 'opsd_whole_policy' },
    { name: 'SDPO, five tokens, a moving average teaches', config: 'sdpo' },
  ],
  {
    name: 'self_distillation_distributions',
    title: 'Self-distillation on distributions: 3,072 sampled answers',
    baseline: 'OPSD, sampled tokens',
    panels+: [{ name: 'exact KL to the teacher, nats per token', metric: 'train/teacher_kl' }],
  },
)
