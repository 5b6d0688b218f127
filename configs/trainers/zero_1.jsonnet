// Optimiser state is dealt out over the ranks. The least that bfloat16 goes with: gradients of micro-batches are
// added up in float32.
{ trainer+: { zero_stage: 1 } }
