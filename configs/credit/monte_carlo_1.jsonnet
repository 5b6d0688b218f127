// VinePPO: one continuation from the prompt and from every step boundary but the last.
{ credit: { type: 'monte_carlo', samples: 1 } }
