// Parallel threads on a laptop: a tiny model that multiplies, trained on one set of solutions written in a line and
// with threads, and RL from each with the published reward and with one whose ratio is to sequential answers.
local rl(name) = {
  configs: ['configs/threadweaver/tiny/rl_%s.jsonnet' % name],
  needs: ['sft_%s' % std.split(name, '_')[0]],
};
{
  type: 'reproduction',
  name: 'threadweaver_tiny',
  title: 'Parallel threads: multiplication with a tiny model',
  directory: 'experiments/threadweaver_tiny',
  seeds: [1, 2, 3],
  baseline: 'SFT sequential',
  experiments: {
    ['sft_%s' % name]: { configs: ['configs/threadweaver/tiny/sft_%s.jsonnet' % name] }
    for name in ['sequential', 'parallel']
  } + {
    ['rl_%s' % name]: rl(name)
    for name in [
      'sequential_published',
      'parallel_published',
      'sequential_sequential_reference',
      'parallel_sequential_reference',
    ]
  },
  columns: [
    { name: 'accuracy', evaluation: 'test' },
    { name: 'critical path (tokens)', evaluation: 'test', value: 'num_tokens_in_the_longest_thread', digits: 1 },
    { name: 'tokens', evaluation: 'test', value: 'total_num_tokens', digits: 1 },
    { name: 'seconds on the slowest way', evaluation: 'test', value: 'seconds_critical' },
    {
      name: 'speed-up',
      evaluation: 'test',
      value: 'speed_up',
      over: 'SFT sequential',
      unit: '×',
      digits: 2,
    },
  ],
  rows: [
    { name: 'SFT sequential', experiment: 'sft_sequential' },
    { name: 'SFT parallel', experiment: 'sft_parallel' },
    { name: 'RL from sequential, published reward', experiment: 'rl_sequential_published' },
    { name: 'RL from parallel, published reward', experiment: 'rl_parallel_published' },
    { name: 'RL from sequential, sequential reference', experiment: 'rl_sequential_sequential_reference' },
    { name: 'RL from parallel, sequential reference', experiment: 'rl_parallel_sequential_reference' },
  ],
  panels: [
    { name: 'validation accuracy', evaluation: 'validation' },
    {
      name: 'critical path (tokens)',
      evaluation: 'validation',
      value: 'num_tokens_in_the_longest_thread',
    },
    { name: 'answers with threads', evaluation: 'validation', value: 'with_parallel' },
  ],
  notes: [
    'Critical path: tokens outside of blocks and, of each block, its tags and its longest thread. Seconds are those'
    + ' that the engine took for the requests on the slowest way through an answer, while it served others.',
  ],
}
