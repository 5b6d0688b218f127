// On the right of small.jsonnet: a server on each machine, for the rank that is there.
{
  engines+: { policy+: { servers: 'per_rank' } },
}
