// Short runs with threads, to see that they train: 15 iterations of 16 problems with eight answers each, on products.
local run(name) = {
  configs: ['configs/threadweaver/tiny/%s.jsonnet' % name],
  needs: ['start'],
  seconds_per_run: 60,
  estimated_from: 'a guess for one of two cores',
};
{
  type: 'reproduction',
  name: 'short_runs_threads',
  title: 'Short runs of methods on products with threads',
  directory: 'experiments/short_runs_threads',
  seeds: [1],
  experiments: {
    start: run('short_start') + { needs: [], shared: true },
    rloo: run('short_rloo'),
    shapley: run('short_shapley'),
  },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'start', experiment: 'start' },
    { name: 'RLOO', experiment: 'rloo' },
    { name: 'Shapley values of threads', experiment: 'shapley' },
  ],
}
