// OlympiadBench: 674 open problems in English without pictures.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__olympiadbench',
  ability: 'math',
  source: lib.hub('Hothan/OlympiadBench', subset='OE_TO_maths_en_COMP', train=null, test='train'),
  instruction: lib.boxed,
  prompt: '{{ question }}',
  ground_truth: '{{ final_answer[0] }}',
}
