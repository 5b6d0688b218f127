// Supervised fine-tuning on the variant `wandering` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('wandering').sft
