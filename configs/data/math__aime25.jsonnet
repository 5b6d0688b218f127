// AIME 2025: 30 problems.
local lib = import 'lib.libsonnet';

lib.math_test('math__aime25', lib.hub('math-ai/aime25', train=null, test='test'))
