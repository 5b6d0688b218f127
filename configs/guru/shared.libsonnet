// Shared by Guru's experiments: Qwen2.5 base models asked in their chat template, one vLLM server on each rank's GPU,
// ZeRO-3. 32,768 tokens of context are for what is measured; training has its own, shorter limits.
//
// Published are servers on four or eight GPUs and, for PPO, a pipeline of eight stages: they are speed, and here a GPU
// holds a server and its share of the trainer in turns. A 32B model so needs GPUs of 140 GB.
//
// Not published: how long to train (`passes` over the rows), and the framework's defaults: temperature 1,
// a weight decay of 0.01, means over tokens.
local domains = import 'domains.libsonnet';

{
  model(file):: {
    model: file.model { chat: {} },
    context_length: 32768,
  },

  // All domains as a mixture: every row is drawn as often as any.
  all_domains:: {
    task: {
      type: 'mixture',
      weighting: { type: 'proportional' },
      domains: { [domain]: { task: domains.task(domain) } for domain in domains.names },
    },
  },

  one_domain(domain):: { task: domains.task(domain) },

  // `problems` an iteration, `samples` answers to each; a step on the answers to `minibatch` problems.
  training(problems, samples, minibatch, passes, rows):: {
    problems_per_iteration: problems,
    problem_sampling: 'epochs',
    iterations: std.ceil(passes * rows / problems),
    rollout: { type: 'single_turn', samples: samples, temperature: 1.0, top_p: 1.0, unfinished_reward: null },
    trainer+: {
      epochs: 1,
      minibatch_size: minibatch * samples,
      learning_rate: 1e-6,
      schedule: { type: 'warmup' },
      weight_decay: 0.01,
      max_grad_norm: 1.0,
    },
    checkpoints: { every: 25, keep_every: 25 },
    evaluation+: { every: 5 },
  },

  base:: (import '../runtimes/policy_iteration.jsonnet')
         + (import '../engines/vllm_per_gpu.jsonnet')
         + (import '../trainers/bf16.jsonnet')
         + (import '../methods/ppo_loss.jsonnet')
         + (import '../objectives/token_mean.jsonnet')
         + (import '../evaluations/guru.jsonnet')
         + { trainer+: { zero_stage: 3, advantage_normalisation: 'none' } },
}
