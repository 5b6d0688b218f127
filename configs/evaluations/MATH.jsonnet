// The five sets on which the paper measures models of MATH: 16 answers to a problem, at most about 500 problems.
local set = import 'paper_set.libsonnet';
{
  evaluation: {
    seed: 2746318213,
    sets: [
      set { name: 'math_test', split: 'test' },
      set { name: 'math_validation', split: 'validation' },
      set { name: 'math_train', split: 'train', problems: 500, choose: 'random' },
      set { name: 'collegeMath_test', split: 'test', task: (import '../tasks/college_math.jsonnet').task, problems: 500, choose: 'random' },
      set { name: 'olympiadbench_test', split: 'test', task: (import '../tasks/olympiadbench.jsonnet').task },
    ],
  },
}
