// With a reward for what the critical path saves of the problem's sequential solution, in place of the published one:
// a thread that adds nothing earns nothing.
(import 'parallel.jsonnet')
+ { experiment_name: 'threadweaver/parallel_sequential_reference', shaping: [] }
+ (import '../shaping/acceleration_sequential.jsonnet')
