// The warm-up that the paper's runs really had: a first step at the whole rate, a second at none, then
// logarithmic. (What was meant is in lib/experiment.libsonnet.)
{ trainer+: { schedule: { type: 'deepspeed_warmup_decay', ratio: 0.03 } } }
