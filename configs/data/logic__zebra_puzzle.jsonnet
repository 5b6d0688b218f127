// Guru's own zebra puzzles; 1.3 thousand.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__zebra_puzzle*.parquet', 'online_eval/logic__zebra_puzzle*_200.parquet') {
  data_source: 'logic__zebra_puzzle',
  ability: 'logical_reasoning',
}
