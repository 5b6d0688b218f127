// Where the rows come from: sums of the quickstart.
(import 'quickstart/sft.jsonnet') + { task+: { train_size: 300 } }
