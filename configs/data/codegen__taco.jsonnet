// TACO, verified. Problems of GeeksforGeeks and LeetCode go, those of fewer than 100 letters and digits, and those with pictures;
// and those whose own solutions fail.
local lib = import 'lib.libsonnet';

lib.code {
  data_source: 'codegen__taco',
  source: lib.hub('likaixin/TACO-verified'),
  expand: 'treetune.data.expansions:code_tests',
  filters: [
    { name: 'GeeksforGeeks and LeetCode', where: 'source not in ("geeksforgeeks", "leetcode")' },
    { name: 'too short', where: '(question | alphanumerics) >= 100' },
    { name: 'pictures', where: '"image" not in (question | lower) and "\\n![" not in question' },
  ],
  prompt: lib.program_of('question'),
  ground_truth: '{{ oracle | json }}',
  extra_info: { function_name: 'function_name', references: 'solutions', dataset: 'source', difficulty: 'difficulty' },
  rules+: [lib.own_solution { reference: 'extra_info.references' }],
}
