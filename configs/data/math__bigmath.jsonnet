// Big-Math, verified. The rows keep the pass rates of an 8B model. The data set asks for an agreement on the hub.
local lib = import 'lib.libsonnet';

lib.math {
  data_source: 'math__bigmath',
  source: lib.hub('SynthLabsAI/Big-Math-RL-Verified'),
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
  extra_info: { dataset: 'source', solve_rate_8b: 'llama8b_solve_rate' },
}
