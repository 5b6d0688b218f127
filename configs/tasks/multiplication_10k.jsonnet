// Five to eight factors up to 1000 in words, as ThreadWeaver describes its multiplication task: 10,000 problems to
// learn from, 1,000 to validate on. Its own problems and solutions were not published; these are of our making, in
// threads over all partial products of a level of the tree. By characters (Qwen3 has a token for each digit):
// 6,800 of an answer, at most 14,700, of which 2,300 lie on the critical path (at most 3,800); 6,600 of a
// sequential one, at most 15,100.
{
  task: {
    type: 'multiplication',
    factors: [5, 8],
    min_value: 0,
    max_value: 1000,
    form: 'tree_digits',
    detail: 'digits',
    wording: 'words',
    grader: { type: 'numeric', without_marker: 'boxed' },
    train_size: 10000,
    validation_size: 1000,
    test_size: 1000,
    seed: 42,
  },
}
