// How far the weights went from the start weights, by layer, along the checkpoints.
{ analyzers+: [{ type: 'weight_distance' }] }
