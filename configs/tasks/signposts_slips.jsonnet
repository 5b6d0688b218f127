// Six choices, all of which must be right; the teacher makes mistakes at four kinds of signs, at some often. Solved
// by one in four.
{
  task: { type: 'signposts', rule: 'all', steps: 6, period: 3, rates: [0.95, 0.9, 0.8, 0.4], options: 4, chatter: 3 },
}
