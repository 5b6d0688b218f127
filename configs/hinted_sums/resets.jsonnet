// RRPO: four continuations of each wrong answer, which alone are trained.
(import '../lib/hinted_sums.libsonnet').policy_gradient('resets', import '../credit/resets.jsonnet')
