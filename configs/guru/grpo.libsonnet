// grpo(model): GRPO on all domains. 128 problems an iteration, 64 answers to each, one step on all of them;
// KL to the start model in the loss.
local domains = import 'domains.libsonnet';
local shared = import 'shared.libsonnet';

function(model)
  shared.base
  + shared.model(model)
  + shared.all_domains
  + shared.training(problems=128, samples=64, minibatch=128, passes=1, rows=domains.all)
  + (import '../credit/group.jsonnet')
  + (import '../objectives/kl_in_loss.jsonnet')
  + {
    rollout+: { max_prompt_tokens: 1024, max_tokens: 3072 },
    trainer+: { objective+: { kl_coef: 1e-3 } },
  }
