// Shapley values of parallel threads (Shapley 1953), with RLOO outside of threads. They value scores, without shaping.
{ credit: { type: 'thread_shapley' }, shaping: [] }
