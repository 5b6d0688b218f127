// OPO: reward minus the group's mean, in which long answers weigh more.
{ credit: { type: 'opo' } }
