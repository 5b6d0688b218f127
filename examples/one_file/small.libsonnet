// The changes of this folder's runs to the quickstart: they sample without a vLLM server, have fewer problems, and
// don't evaluate.
{
  directory: 'experiments/one_file',
  engines: { policy: { type: 'in_process' } },  // samples with PyTorch, in the run's own process
  task+: { train_size: 20000 },
  evaluation: {},
  checkpoints: {},  // the default: a checkpoint after each iteration, of which the two newest are kept
}
