// The task whose rows are exported: 300 sums of the quickstart.
(import 'quickstart/sft.jsonnet') + { task+: { train_size: 300 } }
