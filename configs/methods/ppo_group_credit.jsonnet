// PPO's loss with GRPO's credit, and nothing else of GRPO: what the VinePPO paper and the quickstart compare under the name
// GRPO. As GRPO's own paper has it, with its mean and its KL: presets/grpo_as_published.jsonnet.
(import 'ppo_loss.jsonnet') + (import '../credit/group.jsonnet')
