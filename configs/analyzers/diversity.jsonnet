// How different the answers to one problem are, over the iterations.
{ analyzers+: [{ type: 'diversity' }] }
