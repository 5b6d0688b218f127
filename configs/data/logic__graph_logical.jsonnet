// Guru's own graph puzzles: the next trait on a path; 1.2 thousand. They were generated, and stand nowhere else.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'logic__graph_logical',
  ability: 'logical_reasoning',
  copy: true,
  source: lib.guru('train/logic__graph_logical*.parquet'),
  rules: [lib.length],
}
