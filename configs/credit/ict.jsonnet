// ICT (Feng et al., arXiv:2606.19771): GRPO's advantages at the tenth of each answer's tokens whose distributions
// differ most from the group's mean.
{
  credit: {
    type: 'weighted_by',
    over: { type: 'group' },
    signal: 'group_divergence',
    weights: 'top_share',
    share: 0.1,
    among: 'answer',
    drop: true,
  },
}
