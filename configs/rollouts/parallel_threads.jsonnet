// Answers that fork into threads as ThreadWeaver's do: no budget for a single thread, no nesting, nothing but line ends
// injected at a join. It has no bound on threads either; its data have 50 in a block at most.
{
  rollout+: {
    type: 'parallel_threads',
    parallel: true,
    max_depth: 1,
    max_threads: 50,
    max_blocks: 16,
    thread_tokens: null,
    stragglers: 'go_on',
    malformed: 'go_on',
    conclusion: false,
  },
}
