// Evaluation without top-p: an audit by the authors of a later method found that the published runs' evaluation
// left it out, though their configuration said 0.9.
{
  // {}: no experiment is on the left
  evaluation+: if 'evaluation' in super then { sets: [set { top_p: 1.0 } for set in super.sets] } else {},
}
