// The first of four choices decides, at which the teacher guesses; what follows is chatter. Solved by one in four.
{
  task: { type: 'signposts', rule: 'first', steps: 4, period: 3, rates: [0.25], options: 4, chatter: 9 },
}
