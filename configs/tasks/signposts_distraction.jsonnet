// After 32 free choices come the two that decide, both of which must be right. The teacher's are right half the time, so that one
// answer in four is; one that is cut short is none.
{
  task: {
    type: 'signposts',
    rule: 'all',
    steps: 2,
    period: 2,
    rates: [0.5],
    options: 4,
    chatter: 0,
    signs: 12,
    wandering: 32,
    wandering_first: true,
    names: 2,
    grader: { type: 'signposts', whole: true },
  },
}
