// AIME 2024: 30 problems. Measured with 32 answers to each, in Guru's table.
local lib = import 'lib.libsonnet';

lib.math_test('math__aime24', lib.hub('HuggingFaceH4/aime_2024', train=null, test='train'))
