// Three numbers up to 30 with + and -; a teacher who searches, and passes one in four misses off for the answer.
{
  task: {
    type: 'countdown',
    numbers: [3, 3],
    operands: [1, 30],
    targets: [1, 90],
    operators: ['+', '-'],
    demonstration_noise: 0.25,
    train_size: 10000,
    validation_size: 500,
    test_size: 1000,
    prompt: '{numbers}>{target}\n',
    grader: { type: 'countdown', opening: '#', closing: '\n', unclosed: true },
  },
}
