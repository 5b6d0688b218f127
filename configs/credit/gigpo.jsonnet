// GiGPO (Feng et al., arXiv:2505.10978): an answer is compared with its group, and each turn with all turns that
// followed the same words of an environment.
{ credit: { type: 'gigpo' } }
