// Supervised fine-tuning from random weights on a task of your own.
(import 'quickstart/sft.jsonnet') + {
  imports: ['my_package.largest'],
  experiment_name: 'largest/sft',
  task: { type: 'largest', count: 4 },
}
