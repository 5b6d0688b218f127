// Weights, gradients and optimiser state are sharded over the ranks and kept in the memory of the CPU: it needs
// the least GPU memory, and is the slowest. The reference is kept on the CPU, too.
{
  trainer+: {
    zero_stage: 3,
    offload_parameters: true,
    offload_optimizer: true,
    offload_reference: true,
    gradient_checkpointing: true,
  },
}
