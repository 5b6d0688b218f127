// Append to the files of estimate_difficulty: each shard is a task of a SLURM array with one GPU. `setup` are lines of the shell
// before the command; `options` go to sbatch.
{
  jobs: {
    type: 'slurm',
    options: ['--gpus-per-node=1', '--cpus-per-task=8', '--time=8:00:00'],
    at_once: 8,
  },
}
