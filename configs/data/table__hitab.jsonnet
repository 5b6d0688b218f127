// HiTab (microsoft/HiTab on GitHub) as Guru has it: 4.3 thousand questions about tables with levels of headings.
local lib = import 'lib.libsonnet';

lib.from_guru('table__hitab_4.3k.parquet', 'online_eval/table__hitab*_200.parquet') {
  data_source: 'table__hitab',
  ability: 'table',
}
