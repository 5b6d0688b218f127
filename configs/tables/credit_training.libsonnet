// Learning at equal cost where one choice decides, or where all must be right: `decision` of lib/decisive.libsonnet. All methods
// start from the same model and sample `tokens` tokens, for answers and for their credit together. A method's learning rate and its
// number of problems an iteration are those that did best of three tries on a seed of their own (`tries`). With `seconds`, methods are compared after so
// many seconds of training, and one that samples `faster` gets so many times the tokens. With `steps`, methods are compared after so
// many steps of the optimizer, whatever they sample; all have 16 problems an iteration.
local start(decision) = if std.member(['first', 'last'], decision) then 'start' else decision + '_start';
local methods = {
  // Problems an iteration, and iterations between two measurements.
  local cheap = { problems: 16, every: 4, faster: 1 },
  local dear = { problems: 4, every: 2, faster: 1.5 },
  local values(settings) = '{ credit: { type: "monte_carlo", %s } }' % settings,
  ceiling: cheap {
    name: 'true advantages',
    more: values('states: { type: "every_n_tokens", tokens: 1 }, values: { type: "decided" }'),
  },
  grpo: cheap { name: 'GRPO', more: '{}' },
  siblings: cheap { name: 'siblings', more: values('values: { type: "siblings" }') },
  vineppo_1: dear { name: 'VinePPO, K = 1', more: values('samples: 1') },
  vineppo_3: dear { name: 'VinePPO, K = 3', every: 1, faster: 2.1, more: values('samples: 3') },
  tree: cheap {
    name: 'tree, branches where unsure',
    more: |||
      {
        rollout+: { type: "tree", samples: 4, branching: { type: "least_sure", positions: 3, ways: 1 } },
        credit: { type: "tree", advantage: "leave_one_out", weight: "reach" },
      }
    |||,
  },
};
// Learning rate, and answers a step.
local tries = {
  often: { rate: '3e-4', answers: 32 },
  fast: { rate: '6e-4', answers: 32 },
  oftener: { rate: '3e-4', answers: 16 },
};

local experiment(decision, method, try, tokens, directory, seconds, steps) = {
  local method_settings = methods[method],
  local answers_an_iteration = 16 * 8,
  configs: ['configs/equal_cost/%s.jsonnet' % decision],
  overrides: [
    '{ model+: { name_or_path: "%s/shared/decisive/%s/checkpoints/last/policy" } }' % [directory, start(decision)],
    method_settings.more,
    '{ experiment_name+: "/%s_%s", problems_per_iteration: %d, evaluation+: { every: %d } }'
    % [method, try, method_settings.problems, method_settings.every],
    if steps == null then '{ stop_after: { sampled_tokens: %d } }' % (tokens * if seconds == null then 1 else method_settings.faster)
    else '{ stop_after: null, problems_per_iteration: 16, iterations: %d, evaluation+: { every: 2 } }'
         % std.ceil(steps * tries[try].answers / answers_an_iteration),
    '{ trainer+: { learning_rate: %s, minibatch_size: %d } }' % [tries[try].rate, tries[try].answers],
  ],
  needs: ['start'],
  seconds_per_run: if seconds == null then 40 else seconds * 1.4,
  estimated_from: 'a guess for one of two cores',
};

function(decision, seeds, chosen, title, more={}, tokens=150000, directory='experiments/credit_training_' + decision, seconds=null, steps=null) {
  type: 'reproduction',
  title: title,
  directory: directory,
  seeds: seeds,
  baseline: if std.length(chosen.grpo) > 1 then null else 'GRPO',
  experiments: {
    start: {
      configs: ['configs/equal_cost/%s.jsonnet' % start(decision)],
      shared: true,
      seconds_per_run: 60,
      estimated_from: 'a guess for one of two cores',
    },
  } + {
    [method + '_' + try]: experiment(decision, method, try, tokens, directory, seconds, steps)
    for method in std.objectFields(chosen)
    for try in chosen[method]
  },
  columns: [
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
  ] + if steps != null then [
    { name: 'area over steps', area: { over: 'steps', upto: steps }, curve: 'validation' },
  ] else [
    { name: 'area over tokens', area: { over: 'tokens', upto: tokens }, curve: 'validation' },
    { name: 'area over seconds', area: { over: 'seconds', upto: if seconds == null then tokens / 7500 else seconds }, curve: 'validation' },
  ],
  rows: [
    { name: methods[method].name + (if std.length(chosen[method]) > 1 then ', ' + try else ''), experiment: method + '_' + try }
    for method in ['ceiling', 'grpo', 'siblings', 'vineppo_1', 'vineppo_3', 'tree']
    if std.objectHas(chosen, method)
    for try in chosen[method]
  ],
} + more
