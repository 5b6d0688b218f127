// ARC-AGI-2 (arcprize/ARC-AGI-2 on GitHub) as Guru has it: 190 tasks.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__arcagi2_190.parquet') {
  data_source: 'logic__arcagi2',
  ability: 'logical_reasoning',
}
