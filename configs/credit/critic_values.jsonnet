// treetune's own: step advantages from the run's critic, without continuations: biased by the critic's errors.
{ credit: { type: 'monte_carlo', values: { type: 'critic' } } }
