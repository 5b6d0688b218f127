// Three signs, each met twice: a wrong choice can be repaired in the second round. Solved by one in four.
{
  task: { type: 'signposts', rule: 'once', steps: 6, period: 3, rates: [0.65, 0.25], options: 4, chatter: 3 },
}
