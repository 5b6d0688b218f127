// Every analyzer, the cheap ones first.
(import 'weight_distance.jsonnet')
+ (import 'diversity.jsonnet')
+ (import 'advantage_distribution.jsonnet')
+ (import 'kl_to_reference.jsonnet')
+ (import 'action_ranking.jsonnet')
+ (import 'value_accuracy.jsonnet')
