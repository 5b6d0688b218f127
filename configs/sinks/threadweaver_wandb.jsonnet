// Weights & Biases with the names that ThreadWeaver's README has for its metrics, in addition to those of this
// project, and a table of answers every ten iterations.
{
  sinks+: [{ type: 'wandb', answers_every: 10, further_names: import 'threadweaver_names.libsonnet' }],
}
