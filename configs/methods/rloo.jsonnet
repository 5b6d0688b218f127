// RLOO with the paper's settings for PPO, and no critic.
(import 'policy_gradient.jsonnet') + (import '../credit/rloo.jsonnet')
