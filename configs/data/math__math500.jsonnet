// MATH-500: 500 problems of MATH's test split.
local lib = import 'lib.libsonnet';

lib.math_test('math__math500', lib.hub('HuggingFaceH4/MATH-500', train=null, test='test'))
