// In place of the SFT experiment: from random weights, on the same demonstrations.
(import 'sft.jsonnet')
+ (import '../presets/greedy_jsd.jsonnet')
+ { experiment_name: 'quickstart/greedy_jsd' }
