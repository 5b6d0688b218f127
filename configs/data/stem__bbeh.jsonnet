// BIG-Bench Extra Hard. That the hub has it under this name, with input, target and task, is from memory.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'stem__bbeh',
  ability: 'stem',
  source: lib.hub('BBEH/bbeh', train=null, test='train'),
  prompt: '{{ input }}',
  instruction: lib.boxed,
  ground_truth: '{{ target }}',
  extra_info: { task: 'task' },
  bad_rows: 'drop',
}
