// To append to critic.jsonnet: as credit_table.jsonnet, with the credits that ask a critic, and with true values from 256
// continuations. Before training the critic is untrained, too.
local bench = (import 'analyzers/credit_bench_critic.jsonnet').analyzers[0].methods;
{
  analyzers: [
    table {
      truth+: { samples: 256 },
      methods+: {
        critic: bench.critic,
        'K=3 and critic': bench['K=3 and critic'],
        'V0.5': (import 'credit/v0_5.jsonnet').credit,
      },
      with_rollouts+: { 'tree, least sure'+: { rollout+: { max_tokens: $.rollout.max_tokens } } },
    }
    for table in (import 'credit_table.jsonnet').analyzers
  ],
}
