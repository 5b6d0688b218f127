// LeetCode, with an imports' prefix and a check for each problem. The published solution has to pass it.
local lib = import 'lib.libsonnet';

lib.code {
  data_source: 'codegen__leetcode2k',
  source: lib.hub('newfacade/LeetCodeDataset', revision='34803eb64eab1979069ba1f80e7ea474282e28f3', test='test'),
  splits: ['train', 'test'],
  prompt: '{{ query | sub("### Answer: [(]use the provided format with backticks[)]", "") | trim }}',
  ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ (entry_point | trim) ~ ")"} | json }}',
  extra_info: { prefix: 'prompt', reference: 'completion', title: 'meta.question_title', difficulty: 'meta.difficulty' },
  rules+: [lib.own_solution],
}
