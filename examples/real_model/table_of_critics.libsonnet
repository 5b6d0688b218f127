// To append to credit_table_critic.jsonnet: only the credits that ask a critic, and those that they are compared with, after
// the last iteration.
{
  local table = super.analyzers[0],
  analyzers: [
    table {
      name: 'credits_with_a_critic',
      checkpoints: [8],
      methods: {
        [credit]: table.methods[credit]
        for credit in ['RLOO', 'siblings', 'VinePPO K=3', 'K=3 and critic', 'critic', 'V0.5']
      },
      with_rollouts: {},
    },
  ],
}
