// The quickstart's GRPO with a function as the reward. Its `path` names it, so it needs no `imports`.
(import 'quickstart/grpo.jsonnet') + {
  experiment_name: 'quickstart/own_reward',
  task+: { grader: { type: 'function', path: 'my_package.rewards:close', arguments: { tolerance: 0.2 } } },
}
