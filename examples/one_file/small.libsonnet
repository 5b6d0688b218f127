// The quickstart with a model of a hundred thousand weights, and without a server: what the programs beside it do.
{
  directory: 'experiments/one_file',
  engines: { policy: { type: 'in_process' } },
  task+: { train_size: 20000 },
  evaluation: {},
  checkpoints: {},
}
