// PPO's loss with RLOO's credit, and nothing else of RLOO: what the VinePPO paper and the quickstart compare under the name
// RLOO. As RLOO's own paper has it, with a sum over tokens and its KL: presets/rloo_as_published.jsonnet.
(import 'ppo_loss.jsonnet') + (import '../credit/rloo.jsonnet')
