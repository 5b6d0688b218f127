// KL to the start weights and accuracy, along the checkpoints.
{ analyzers+: [{ type: 'kl_to_reference', split: 'validation', problems: 128, samples: 4 }] }
