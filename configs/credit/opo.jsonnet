// OPO (Hao et al., arXiv:2505.23585): reward minus the group's mean, in which long answers weigh more.
{ credit: { type: 'opo' } }
