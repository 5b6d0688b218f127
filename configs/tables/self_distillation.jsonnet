// OPSD and GRPO on sums whose answer the teacher's prompt shows: 3,072 sampled answers and 96 optimizer steps each, from one
// start model. The comparisons were declared before any of these seeds was run: each row with GRPO, on the area under the
// accuracy curve over steps (all methods sample 32 answers a step), and on test pass@1. The learning rate is that of seed 101
// (self_distillation_tries.jsonnet). `GRPO, KL measured` is GRPO; it scores answers only to measure the KL.
(import 'self_distillation.libsonnet')([1, 2, 3, 4, 5], {
  grpo: 'GRPO',
  grpo_measured: 'GRPO, KL measured',
  opsd: 'OPSD, the policy teaches',
  opsd_start_teacher: 'OPSD, the start model teaches',
  cpo: 'CPO',
}, {
  name: 'self_distillation',
  title: 'Self-distillation with the answer as context: 3,072 sampled answers',
})
