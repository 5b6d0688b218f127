// Guru's own ordering puzzles; 1.9 thousand. The task ordering_puzzles makes others, as many as you like.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__ordering_puzzle*.parquet', 'online_eval/logic__ordering_puzzle*_100.parquet') {
  data_source: 'logic__ordering_puzzle',
  ability: 'logical_reasoning',
}
