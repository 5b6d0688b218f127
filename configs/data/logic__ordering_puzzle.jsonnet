// Guru's own ordering puzzles; 1.9 thousand. The task ordering_puzzles makes others, as many as you like.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'logic__ordering_puzzle',
  ability: 'logical_reasoning',
  copy: true,
  source: lib.guru('train/logic__ordering_puzzle*.parquet'),
  rules: [lib.length],
}
