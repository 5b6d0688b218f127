// PPO on Guru's domain `math` from Qwen2.5-3B, for one machine of eight GPUs: one answer to each of 512 problems, a critic as
// large as the policy, KL to the start model in the reward. The settings are those of 32b_ppo.jsonnet, since those of the
// published one-node run are not known; the number of passes is ours.
local domains = import 'domains.libsonnet';
local shared = import 'shared.libsonnet';

shared.base
+ shared.model(import '../models/qwen2.5-3b.jsonnet')
+ shared.one_domain('math')
+ shared.training(problems=512, samples=1, minibatch=256, passes=4, rows=domains.size('math'))
+ (import '../methods/ppo.jsonnet')
+ (import '../objectives/kl_in_reward.jsonnet')
+ {
  experiment_name: 'guru/3b_ppo_math',
  rollout+: { max_prompt_tokens: 1024, max_tokens: 8192 },
  credit+: { critic: { learning_rate: 1e-5 } },
  trainer+: {
    objective+: { kl_coef: 1e-3 },
    advantage_normalisation: 'whiten',
    zero_stage: 2,
    offload_optimizer: true,
  },
}
