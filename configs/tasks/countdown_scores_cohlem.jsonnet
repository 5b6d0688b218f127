// What answers earn in the single-file GRPO (CohleM/RL-GRPO): 0.01 for anything, 0.01 more for an expression of
// the given numbers, and 1 more where its value is right. An answer that was cut off is anything.
{
  task+: { grader+: { scores: { no_answer: 0.01, malformed: 0.01, wrong: 0.02, right: 1.01 } } },
  rollout+: { unfinished_reward: 0.01 },
}
