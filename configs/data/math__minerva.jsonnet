// Minerva Math: 272 problems of university courses.
local lib = import 'lib.libsonnet';

lib.math_test('math__minerva', lib.hub('math-ai/minervamath', train=null, test='test')) { prompt: '{{ question }}' }
