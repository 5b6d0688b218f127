// MATH-500: 500 problems of MATH's test split.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__math500',
  ability: 'math',
  source: lib.hub('HuggingFaceH4/MATH-500', train=null, test='test'),
  instruction: lib.boxed,
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
}
