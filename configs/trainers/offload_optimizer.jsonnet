// Optimiser state in the memory of the CPU, where it is updated.
{ trainer+: { offload_optimizer: true } }
