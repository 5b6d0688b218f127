// VinePPO (Kazemnejad et al., arXiv:2410.01679): no critic; a state is worth the mean of what its K continuations earn,
// asked at the prompt and at every step boundary but the last. K = 9 is the paper's.
(import 'ppo_loss.jsonnet') + { credit: { type: 'monte_carlo', samples: 9 } }
