// Supervised fine-tuning on the variant `every` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('every').sft
