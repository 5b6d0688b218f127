// AMC 12 of 2022 and 2023: 83 problems. Answers are numbers such as 142.0.
local lib = import 'lib.libsonnet';

lib.math_test('math__amc', lib.hub('AI-MO/aimo-validation-amc', train=null, test='train')) {
  ground_truth: '{{ answer | int if answer == answer | int else answer }}',
}
