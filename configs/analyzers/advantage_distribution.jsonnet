// Advantages and values of steps by their place in the answer, over the iterations.
{ analyzers+: [{ type: 'advantage_distribution' }] }
