// Append it to a task of rows whose train rows make_threads wrote: the parallel solutions become the
// demonstrations. For the sequential baseline on the same rows, leave demonstration_field as it was.
{
  task+: {
    train: ['data/parallel/threads.jsonl'],
    validation_size: null,
    demonstration_field: 'parallel_solution',
  },
}
