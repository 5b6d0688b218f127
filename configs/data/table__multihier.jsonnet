// MultiHiertt (psunlpgroup/MultiHiertt on GitHub) as Guru has it: 1.5 thousand arithmetic questions that need no text.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'table__multihier',
  ability: 'table',
  copy: true,
  source: lib.guru('train/table__multihier_1.5k.parquet'),
  rules: [lib.length],
}
