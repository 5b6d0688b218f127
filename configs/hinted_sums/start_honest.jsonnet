// A start model whose teacher is more careful with a hint, and never copies it.
(import '../lib/hinted_sums.libsonnet').start_honest
