// Minerva Math: 272 problems of university courses.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__minerva',
  ability: 'math',
  source: lib.hub('math-ai/minervamath', train=null, test='test'),
  instruction: lib.boxed,
  prompt: '{{ question }}',
  ground_truth: '{{ answer }}',
}
