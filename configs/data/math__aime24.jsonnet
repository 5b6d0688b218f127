// AIME 2024: 30 problems. Measured with 32 answers to each, in Guru's table.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__aime24',
  ability: 'math',
  source: lib.hub('HuggingFaceH4/aime_2024', train=null, test='train'),
  instruction: lib.boxed,
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
}
