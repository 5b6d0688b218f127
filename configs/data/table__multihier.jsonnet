// MultiHiertt (psunlpgroup/MultiHiertt on GitHub) as Guru has it: 1.5 thousand arithmetic questions that need no text.
local lib = import 'lib.libsonnet';

lib.from_guru('table__multihier_1.5k.parquet', 'online_eval/table__multihier*_200.parquet') {
  data_source: 'table__multihier',
  ability: 'table',
}
