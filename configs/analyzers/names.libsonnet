// Further configurations of this folder, each under its name: configs/analyzers/NAME.jsonnet is the field NAME.
{
  // The better of two next steps, and the best of five, by values and in truth (256 rollouts each).
  action_ranking: { analyzers+: [{ type: 'action_ranking', rollouts: 256, samples: [1, 3, 9], alternatives: 5, states: 48 }] },

  // Advantages and values of steps by their place in the answer, over the iterations.
  advantage_distribution: { analyzers+: [{ type: 'advantage_distribution' }] },

  // How different the answers to one problem are, over the iterations.
  diversity: { analyzers+: [{ type: 'diversity' }] },

  // KL to the start weights and accuracy, along the checkpoints.
  kl_to_reference: { analyzers+: [{ type: 'kl_to_reference', split: 'validation', problems: 128, samples: 4 }] },

  // Monte-Carlo values (K = 1, 3, 9) and the critic against 256 rollouts, at the last checkpoint.
  value_accuracy: { analyzers+: [{ type: 'value_accuracy', rollouts: 256, samples: [1, 3, 9], states: 128, prompts: 32 }] },

  // The same along training: every checkpoint, with fewer states of each.
  value_accuracy_along: {
    analyzers+: [
      { type: 'value_accuracy', name: 'value_accuracy_along', checkpoints: 'all', states: 48, prompts: 0 },
    ],
  },

  // How far the weights went from the start weights, by layer, along the checkpoints.
  weight_distance: { analyzers+: [{ type: 'weight_distance' }] },
}
