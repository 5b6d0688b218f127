// Append it to tasks/gsm8k: the VinePPO paper's own 7,100 / 373 / 1,319 (fetched with --paper).
{ task+: { source: { type: 'disk', path: 'data/paper/gsm8k' }, validation_size: null } }
