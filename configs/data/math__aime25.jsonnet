// AIME 2025: 30 problems.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__aime25',
  ability: 'math',
  source: lib.hub('math-ai/aime25', train=null, test='test'),
  instruction: lib.boxed,
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
}
