// Supervised fine-tuning on the variant `coin` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('coin').sft
