// VinePPO (Kazemnejad et al., arXiv:2410.01679): Monte-Carlo values, no critic.
(import 'policy_gradient.jsonnet')
+ (import '../credit/monte_carlo_9.jsonnet')
+ (import '../analyzers/value_accuracy.jsonnet')
+ (import '../analyzers/gradient_variance.jsonnet')
+ (import '../analyzers/advantage_distribution.jsonnet')
+ (import '../analyzers/action_ranking.jsonnet')
