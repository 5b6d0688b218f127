// The warm-up that the paper's runs really had: a first step at the whole rate, a second at none, then
// logarithmic. (What was meant is in trainers/adamw_lr1e-6.jsonnet.)
{ trainer+: { schedule: { type: 'deepspeed_warmup_decay', ratio: 0.03 } } }
