// SPO-chain (Guo et al., arXiv:2505.23564, and its public code for Rho-1B): nine continuations before every fifth token
// that was sampled with less than 0.9, likelier tokens not trained, advantages whitened over the others, over the
// iteration (its code: over each step of a device). It also asks the prompt, whose value no trained token has.
(import 'preset.libsonnet')('spo_chain')
+ (import 'policy_gradient.libsonnet')
+ {
  credit: (import '../credit/spo_chain.jsonnet').credit,
  trainer+: { advantage_normalisation: 'whiten' },
}
