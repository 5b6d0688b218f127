// HiTab (microsoft/HiTab on GitHub) as Guru has it: 4.3 thousand questions about tables with levels of headings.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'table__hitab',
  ability: 'table',
  copy: true,
  source: lib.guru('train/table__hitab_4.3k.parquet'),
  rules: [lib.length],
}
