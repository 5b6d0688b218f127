// treetune's own: a branch's value minus that of its siblings, weighted so that the expected gradient is that of
// independent answers.
{ credit: { type: 'tree', advantage: 'leave_one_out', weight: 'reach' } }
