// Further configurations of this folder, each under its name: configs/hardware/NAME.jsonnet is the field NAME.
{
  // One vLLM server on two GPUs, for a model that one doesn't hold. The GPUs are the first two that the ranks
  // see; `engines+: { policy+: { devices: [6, 7] } }` names others, `servers: 'per_rank'` gives every rank two of its own.
  engine_tp_2: { engines+: { policy+: { tensor_parallel_size: 2 } } },

  // FlashAttention-2 over sequences packed into one row: no padding, no square of attention scores. NVIDIA
  // GPUs only, in bf16; needs flash-attn, which TREETUNE_FLASH_ATTN=1 scripts/setup.sh builds. Without it,
  // packed rows have PyTorch's own kernels.
  flash_attention_packed: {
    model+: { attention: 'flash_attention_2', dtype: 'bfloat16' },
    trainer+: {
      precision: 'bfloat16',
      layout: 'packed',
      zero_stage: std.max(1, if 'zero_stage' in super then super.zero_stage else 0),  // 0 can't add up in float32
    },
  },

  // Liger's fused Triton kernels in the trained model's norms, rotary embeddings and MLPs: less memory for
  // activations. NVIDIA GPUs only; for pretrained models of the architectures that Liger knows.
  liger: { model+: { liger: true } },

  // Trains adapters of rank 16 on every linear layer and leaves the start model as it is: little optimiser
  // state, no second model for the reference. The engine gets them merged into the weights. Rates are usually
  // higher than for all weights, by a factor of ten or so: set `trainer.learning_rate` for your model.
  lora: { trainer+: { lora: { rank: 16, alpha: 32 }, offload_reference: false } },

  // As lora.jsonnet, with the adapters sent to the server as they are: it holds the start model once and adds
  // them itself, so that a sync moves megabytes.
  lora_adapters: (import 'lora.jsonnet') + { trainer+: { lora+: { send: 'adapters' } } },

  // Two neighbouring ranks share every weight matrix of the trained model (DeepSpeed's AutoTP), with ZeRO up
  // to 2: for weights that ZeRO-3 would have to move too often. The reference stays whole on each: here, on
  // the CPU.
  trainer_tp_2: {
    trainer+: {
      tensor_parallel_size: 2,
      zero_stage: 1,
      offload_optimizer: false,
      offload_parameters: false,
      offload_reference: true,
    },
  },

  // Two neighbouring ranks share every sequence (DeepSpeed-Ulysses), each with half of its tokens and
  // activations: for sequences that are too long for one GPU. The number has to divide the ranks and the
  // attention heads.
  ulysses_2: { trainer+: { sequence_parallel_size: 2 } },

  // Weights, gradients and optimiser state dealt out over the ranks and kept in the memory of the CPU: the
  // least of a GPU, and the slowest. The reference waits on the CPU, too.
  zero_3_offload: {
    trainer+: {
      zero_stage: 3,
      offload_parameters: true,
      offload_optimizer: true,
      offload_reference: true,
      gradient_checkpointing: true,
    },
  },
}
