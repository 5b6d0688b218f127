// DeepScaleR's 40 thousand problems of AIME, AMC, Omni-MATH and STILL.
local lib = import 'lib.libsonnet';

lib.math {
  data_source: 'math__deepscaler',
  source: lib.hub('agentica-org/DeepScaleR-Preview-Dataset'),
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
}
