// CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, and every token keeps its gradient.
// The paper doesn't print its upper bound. Weights leave 1 where an iteration has several steps (minibatch_size).
(import 'preset.libsonnet')('cispo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'cispo', aggregation: 'token' } } }
