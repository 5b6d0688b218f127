// The clipped policy gradient on all answers. What VinePPO, PPO and their baselines share; they differ in credit.
{ selection: { type: 'all' }, trainer+: { objective+: { type: 'ppo' } } }
