// CPO: GRPO's advantage, shaped by how much likelier the answer in the prompt makes each token.
(import '../lib/hinted_sums.libsonnet').self_distillation('cpo', { outcome_weight: 1, clip: 1, keeps_sign: true })
