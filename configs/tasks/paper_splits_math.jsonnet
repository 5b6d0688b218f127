// Append it to tasks/math: the VinePPO paper's own 11,500 / 500 / 500 (fetched with --paper).
{ task+: { source: { type: 'disk', path: 'data/paper/math' }, validation_size: null } }
