// The start model: it learns sums, and what an answer in its prompt is good for.
(import '../lib/hinted_sums.libsonnet').start
