// Supervised fine-tuning on the variant `slips` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('slips').sft
