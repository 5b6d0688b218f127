// Weights, gradients and optimiser state dealt out over the ranks and kept in the memory of the CPU: the
// least of a GPU, and the slowest. The reference waits on the CPU, too.
{
  trainer+: {
    zero_stage: 3,
    offload_parameters: true,
    offload_optimizer: true,
    offload_reference: true,
    gradient_checkpointing: true,
  },
}
