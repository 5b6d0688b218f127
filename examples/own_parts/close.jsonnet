// GRPO on the quickstart's task with a function as the reward. It needs no import: its path says where it is.
(import 'quickstart/grpo.jsonnet') + {
  experiment_name: 'quickstart/own_reward',
  task+: { grader: { type: 'function', path: 'my_package.rewards:close', arguments: { tolerance: 0.2 } } },
}
