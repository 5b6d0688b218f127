// What answers earn in TinyZero and RL2: 0.1 for any that can be found, 1 for a correct one. An equation is none.
{
  task+: {
    grader+: { equation: 'refused', scores: { no_answer: 0.0, malformed: 0.1, wrong: 0.1, correct: 1.0 } },
  },
}
