// Weights & Biases with names that dashboards of verl have, in addition to those of this project, and a table of
// answers every ten iterations. The names assume an evaluation set called test.
{
  sinks+: [{ type: 'wandb', answers_every: 10, further_names: import 'verl_names.libsonnet' }],
}
