// Countdown with three or four numbers up to 99 and a target up to 99, as in the public data sets; made here, from
// expressions that solve them.
{
  task: {
    type: 'countdown',
    numbers: [3, 4],
    operands: [1, 99],
    targets: [10, 99],
    operators: ['+', '-', '*', '/'],
    train_size: 20000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'countdown' },
  },
}
