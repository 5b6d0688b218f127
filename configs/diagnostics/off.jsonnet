// Looks for no sign of collapse.
{
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
}
