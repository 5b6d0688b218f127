// Supervised fine-tuning on the variant `repair` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('repair').sft
