// At most 8 sequences at a time on a GPU, for experiments on a single one. The update stays the same.
{ trainer+: { sequences_per_micro_batch: 8 } }
