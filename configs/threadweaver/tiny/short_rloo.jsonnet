// A short run with threads: RLOO's advantage for all of an answer.
(import 'short.libsonnet').policy_gradient('short_rloo', import '../../credit/rloo.jsonnet')
