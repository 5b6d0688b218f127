// V0.5 (Zhang et al., arXiv:2603.10848): a baseline between the group's mean and the critic's value of the prompt.
{ credit: { type: 'v0_5' } }
