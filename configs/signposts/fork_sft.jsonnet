// Supervised fine-tuning on the variant `fork` of signposts: the start model of the other experiments on it.
(import '../lib/signposts.libsonnet')('fork').sft
