// Large models on GPUs: bf16, activations made again in the backward pass, sequences packed without
// padding, the reference on the CPU while it isn't needed. None of it is the method's.
{
  trainer+: {
    precision: 'bfloat16',
    zero_stage: std.max(1, if 'zero_stage' in super then super.zero_stage else 0),  // 0 can't add up in float32
    gradient_checkpointing: true,
    layout: 'packed',
    offload_reference: true,
    tokens_per_micro_batch: 32768,
  },
}
