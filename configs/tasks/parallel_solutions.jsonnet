// On the right of a task of rows: its train rows are those that make_threads wrote, and the parallel solutions are the
// demonstrations. For the sequential baseline on the same rows, leave demonstration_field as it was.
{
  task+: {
    train: ['data/parallel/threads.jsonl'],
    validation_size: null,
    demonstration_field: 'parallel_solution',
  },
}
