// AMC 12 of 2022 and 2023: 83 problems. Answers are numbers such as 142.0.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'math__amc',
  ability: 'math',
  source: lib.hub('AI-MO/aimo-validation-amc', train=null, test='train'),
  instruction: lib.boxed,
  prompt: '{{ problem }}',
  ground_truth: '{{ answer | int if answer == answer | int else answer }}',
}
