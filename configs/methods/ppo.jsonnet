// The paper's PPO: a critic as large as the policy. It stays on the GPU too, so the server gets less of it.
(import 'policy_gradient.jsonnet')
+ (import '../credit/gae.jsonnet')
+ (import '../analyzers/value_accuracy.jsonnet')
+ (import '../analyzers/gradient_variance.jsonnet')
+ (import '../analyzers/action_ranking.jsonnet')
+ {
  credit+: { critic: { learning_rate: null, value_clip: 0.2 } },
  engine+: { gpu_memory_utilization: 0.35 },
}
