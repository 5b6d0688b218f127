// OPSD and GRPO on sums whose answer the teacher's prompt shows: 3,072 sampled answers and 96 optimizer steps each, from one
// start model. The comparisons were declared before any of these seeds was run: each method with GRPO, on the area under the
// accuracy curve over steps (32 sampled answers a step) and on test pass@1. The learning rate is one of seed 101
// (self_distillation_tries.jsonnet), where OPSD with the present policy as the teacher collapsed at every rate and bound.
(import 'self_distillation.libsonnet')(
  [1, 2, 3],
  [
    { name: 'GRPO', config: 'grpo' },
    { name: 'OPSD, the start model teaches', config: 'opsd_start_teacher' },
    { name: 'OPSD, the policy teaches', config: 'opsd' },
    { name: 'CPO', config: 'cpo' },
  ],
  {
    name: 'self_distillation',
    title: 'Self-distillation with the answer as context: 3,072 sampled answers',
    baseline: 'GRPO',
  },
)
