// Two neighbouring ranks share every weight matrix of the trained model (DeepSpeed's AutoTP), with ZeRO up
// to 2: for weights that ZeRO-3 would have to move too often. The reference stays whole on each: here, on
// the CPU.
{
  trainer+: {
    tensor_parallel_size: 2,
    zero_stage: 1,
    offload_optimizer: false,
    offload_parameters: false,
    offload_reference: true,
  },
}
