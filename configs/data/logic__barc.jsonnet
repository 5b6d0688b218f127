// BARC (barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems) as Guru has it: 1.6 thousand tasks.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__barc_1.6k.parquet') {
  data_source: 'logic__barc',
  ability: 'logical_reasoning',
}
