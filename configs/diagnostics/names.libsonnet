// Further configurations of this folder, each under its name: configs/diagnostics/NAME.jsonnet is the field NAME.
{
  // Looks for no sign of collapse.
  off: {
    diagnostics: {
      entropy_floor: null,
      entropy_share: null,
      length_floor: null,
      length_share: null,
      limit_share: null,
      unfinished_ceiling: null,
      mixed_floor: null,
      gradient_variation_ceiling: null,
    },
  },

  // Ends a run that collapses, and keeps the last checkpoint from before.
  stop_on_collapse: { diagnostics+: { on_collapse: 'stop' } },
}
