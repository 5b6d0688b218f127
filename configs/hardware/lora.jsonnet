// Trains adapters of rank 16 on every linear layer and leaves the start model as it is: little optimiser
// state, no second model for the reference. The engine gets them merged into the weights. Rates are usually
// higher than for all weights, by a factor of ten or so: set `trainer.learning_rate` for your model.
{ trainer+: { lora: { rank: 16, alpha: 32 }, offload_reference: false } }
