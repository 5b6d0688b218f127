// Step advantages from the run's own critic, without continuations: biased by the critic's errors.
{ credit: { type: 'monte_carlo', values: { type: 'critic' } } }
