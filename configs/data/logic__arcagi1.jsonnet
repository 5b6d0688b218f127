// ARC-AGI-1 (fchollet/ARC-AGI on GitHub) as Guru has it: 111 tasks, at most six demonstrations each.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__arcagi1_111.parquet', 'offline_eval/simulation__arcagi1_200.parquet') {
  data_source: 'logic__arcagi1',
  ability: 'logical_reasoning',
}
