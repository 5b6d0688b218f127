// The rollout is a tree: siblings give each other values, and every token is trained once.
(import 'ppo_loss.jsonnet') + (import '../rollouts/tree.jsonnet') + (import '../credit/tree.jsonnet')
