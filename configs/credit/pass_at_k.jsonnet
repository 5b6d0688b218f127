// Pass@k training (Chen et al., arXiv:2508.10751): the change that an answer makes to the best of four answers,
// normalised in the group.
{ credit: { type: 'pass_at_k', k: 4 } }
