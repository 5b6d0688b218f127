// With the reward that ThreadWeaver's README has, in place of its code's: ratio - 1, and 0 for a wrong answer.
(import 'parallel.jsonnet')
+ { experiment_name: 'threadweaver/parallel_readme', shaping: [] }
+ (import '../shaping/acceleration_published_readme.jsonnet')
