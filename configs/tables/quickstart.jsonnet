// What the quickstart's experiments reached on held-out problems. `./run.sh` makes the first two.
{
  type: 'experiments',
  title: 'Quickstart: sums of four two-digit numbers, sampled as in training',
  directory: 'experiments',
  output: 'quickstart/table.json',
  rows: [
    { name: 'sft', experiment: 'quickstart/sft' },
    { name: 'vineppo', experiment: 'quickstart/vineppo' },
    { name: 'ppo', experiment: 'quickstart/ppo', optional: true },
    { name: 'grpo', experiment: 'quickstart/grpo', optional: true },
    { name: 'rloo', experiment: 'quickstart/rloo', optional: true },
  ],
}
