// The quickstart with a model of a hundred thousand weights, and without a server: as the programs in this folder do it.
{
  directory: 'experiments/one_file',
  engines: { policy: { type: 'in_process' } },
  task+: { train_size: 20000 },
  evaluation: {},
  checkpoints: {},
}
