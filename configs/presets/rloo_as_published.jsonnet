// RLOO (Ahmadian et al., arXiv:2402.14740): the log-prob of the whole answer, so a sum over its tokens; the
// others' mean as baseline. KL in the reward with TRL's coefficient, each token's for itself and without a baseline
// (REINFORCE++'s), where the paper has the whole answer's within what is compared: the same gradient on average.
(import 'preset.libsonnet')('rloo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/rloo.jsonnet')
+ (import '../objectives/kl_in_reward.jsonnet')
+ { trainer+: { objective+: { aggregation: 'constant', constant_length: 1, kl_coef: 0.05 } } }
