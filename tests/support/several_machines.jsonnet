// On the right of small.jsonnet: a server on each machine, for the rank that is there. Machines that share the cores of
// one computer start their servers minutes apart.
{
  engines+: { policy+: { servers: 'per_rank' } },
  rank_deadline: 900,
}
