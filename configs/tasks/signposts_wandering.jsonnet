// One choice decides, at which the teacher guesses; then come 24 free choices at the same sign. Solved by one in four; an answer
// that is cut short is none.
{
  task: {
    type: 'signposts',
    rule: 'first',
    steps: 1,
    period: 1,
    rates: [0.25],
    options: 4,
    chatter: 0,
    signs: 12,
    wandering: 24,
    names: 4,
    grader: { type: 'signposts', whole: true },
  },
}
