// Weights & Biases: a run there mirrors this one, as one run through all restarts. Set WANDB_API_KEY or log in;
// WANDB_RUN_ID chooses the run, WANDB_MODE=offline sends nothing.
{ sinks+: [{ type: 'wandb' }] }
