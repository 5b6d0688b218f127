// A short run with threads: Shapley values for threads, RLOO's advantage for the rest of an answer.
(import 'short.libsonnet').policy_gradient('short_shapley', import '../../credit/thread_shapley.jsonnet')
