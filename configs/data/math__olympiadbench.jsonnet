// OlympiadBench: 674 open problems in English without pictures.
local lib = import 'lib.libsonnet';

lib.math_test('math__olympiadbench', lib.hub('Hothan/OlympiadBench', subset='OE_TO_maths_en_COMP', train=null, test='train')) {
  prompt: '{{ question }}',
  ground_truth: '{{ final_answer[0] }}',
}
