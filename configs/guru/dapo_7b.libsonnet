// dapo_7b(domain): DAPO (Yu et al., arXiv:2503.14476) on one domain from Qwen2.5-7B; published on eight machines of eight
// GPUs. 512 problems an iteration, 16 answers to each, a step on those to 32 problems. Answers of 20,480 tokens, of which
// the last 4,096 cost more and more; no KL. Their files don't sample until groups are mixed: for that,
// append rollouts/until_mixed.jsonnet.
//
// Their scripts set both bounds of the clip to the lower one, so that clip-higher was off: compat/guru_clip_not_higher.jsonnet.
local domains = import 'domains.libsonnet';
local shared = import 'shared.libsonnet';

function(domain)
  shared.base
  + shared.model(import '../models/qwen2.5-7b.jsonnet')
  + shared.one_domain(domain)
  + shared.training(problems=512, samples=16, minibatch=32, passes=10, rows=domains.size(domain))
  + (import '../credit/group.jsonnet')
  + (import '../objectives/clip_higher.jsonnet')
  + (import '../objectives/dual_clip.jsonnet')
  + {
    rollout+: { max_prompt_tokens: 4096, max_tokens: 20480 },
    shaping+: [{ type: 'overlong_penalty', cache: 4096, scale: 1.0 }],
    trainer+: {
      objective+: { dual_clip: 10.0 },
      schedule: { type: 'warmup', steps: 10 },
      weight_decay: 0.1,
      offload_optimizer: true,
      offload_parameters: true,
      measure_kl: false,
    },
  }
