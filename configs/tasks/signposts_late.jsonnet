// The last of six choices decides, at which the teacher guesses: a late reward, for none of what came before it.
{
  task: { type: 'signposts', rule: 'last', steps: 6, period: 3, rates: [0.25], options: 4, chatter: 3 },
}
