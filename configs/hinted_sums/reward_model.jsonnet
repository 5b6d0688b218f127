// DPO on the start model's answers: a model whose log-ratio to the start model is an implicit reward.
(import '../lib/hinted_sums.libsonnet').preferences('reward_model', import '../methods/dpo.jsonnet')
