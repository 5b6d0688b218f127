// Liger's fused Triton kernels in the trained model's norms, rotary embeddings and MLPs: less memory for
// activations. NVIDIA GPUs only; for pretrained models of the architectures that Liger knows.
{ model+: { liger: true } }
