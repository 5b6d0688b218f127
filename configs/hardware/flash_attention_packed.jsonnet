// FlashAttention-2 over sequences packed into one row: no padding, no square of attention scores. NVIDIA
// GPUs only, in bf16; needs flash-attn, which TREETUNE_FLASH_ATTN=1 scripts/setup.sh builds. Without it,
// packed rows have PyTorch's own kernels.
{
  model+: { attention: 'flash_attention_2', dtype: 'bfloat16' },
  trainer+: {
    precision: 'bfloat16',
    layout: 'packed',
    zero_stage: std.max(1, if 'zero_stage' in super then super.zero_stage else 0),  // 0 can't add up in float32
  },
}
