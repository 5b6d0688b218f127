// On the right of small.jsonnet: a server on each machine, and answers enough for four of them.
{
  engines+: { policy+: { servers: 'per_rank' } },
}
