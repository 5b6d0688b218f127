// SuperGPQA: choices of up to ten; 200 of its 26,529 questions, drawn by the seed, as Guru measures.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'stem__supergpqa',
  ability: 'stem',
  source: lib.hub('m-a-p/SuperGPQA', train=null, test='train'),
  prompt: '{{ question | trim }}\n{% for option in options %}{{ "ABCDEFGHIJ"[loop.index0] }}) {{ option }}\n{% endfor %}',
  instruction: lib.choice,
  ground_truth: '{{ answer_letter }}',
  extra_info: { field: 'field', difficulty: 'difficulty' },
  sample: { test: 200 },
}
