// PPO on all of Guru's domains from Qwen2.5-32B: one answer to each of 512 problems, a critic as large as the policy, KL to
// the start model in the reward; published on sixteen machines of eight GPUs.
local domains = import 'domains.libsonnet';
local shared = import 'shared.libsonnet';

shared.base
+ shared.model(import '../models/qwen2.5-32b.jsonnet')
+ shared.all_domains
+ shared.training(problems=512, samples=1, minibatch=256, passes=4, rows=domains.all)
+ (import '../methods/ppo.jsonnet')
+ (import '../objectives/kl_in_reward.jsonnet')
+ {
  experiment_name: 'guru/32b_ppo',
  rollout+: { max_prompt_tokens: 1024, max_tokens: 8192 },
  credit+: { critic: { learning_rate: 1e-5 } },
  trainer+: {
    objective+: { kl_coef: 1e-3 },
    advantage_normalisation: 'whiten',
    sequence_parallel_size: 2,
    offload_optimizer: true,
  },
}
