// One vLLM server on two GPUs, for a model that one doesn't hold. The GPUs are the first two that the ranks
// see; `engines+: { policy+: { devices: [6, 7] } }` names others, `servers: 'per_rank'` gives every rank two of its own.
{ engines+: { policy+: { tensor_parallel_size: 2 } } }
