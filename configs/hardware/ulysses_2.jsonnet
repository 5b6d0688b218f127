// Two neighbouring ranks share every sequence (DeepSpeed-Ulysses), each with half of its tokens and
// activations: for sequences that are too long for one GPU. The number has to divide the ranks and the
// attention heads.
{ trainer+: { sequence_parallel_size: 2 } }
