// VIMPO (Kang et al., arXiv:2606.20008): the policy's log-ratios to the start model are made a value function, whose
// changes are the advantages. The authors' numbers; on other tasks beta is the first one to change.
(import 'preset.libsonnet')('vimpo')
+ (import 'policy_gradient.libsonnet')
+ {
  credit: { type: 'group', std: false },
  trainer+: {
    advantage_normalisation: 'none',
    objective: { type: 'vimpo', beta: 5e-4, actor_coef: 5e-3 },
  },
}
