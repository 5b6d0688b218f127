// Four answers, and before the three least probable tokens of each one further: 16, for the tokens of eight or so. Wants the
// credit 'tree'.
{
  rollout+: {
    type: 'tree',
    samples: 4,
    branching: { type: 'least_sure', positions: 3, ways: 1 },
  },
}
