// SDPO's loss on the five most likely tokens: a moving average of the policy, with the answer in its prompt, is the teacher.
(import '../lib/hinted_sums.libsonnet').distribution_distillation('sdpo', { weights: 'average', decay: 0.95 }, { divergence: 'jsd', top_k: 5, importance_cap: 2.0 })
