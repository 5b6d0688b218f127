// WebInstruct-verified: science but no mathematics, of universities and beyond, whose answer is neither a choice nor yes or no, has at
// most 30 tokens and no more than three decimals.
local lib = import 'lib.libsonnet';

{
  type: 'prepare_data',
  data_source: 'stem__web',
  ability: 'stem',
  source: lib.hub('TIGER-Lab/WebInstruct-verified'),
  filters: [
    { name: 'mathematics', where: 'category != "Mathematics"' },
    { name: 'below university', where: 'difficulty in ("University", "PhD")' },
    { name: 'choices and yes or no', where: 'answer_type not in ("Boolean", "Multiple Choice")' },
    { name: 'no answer', where: '(answer | trim | length) > 0' },
    { name: 'many decimals', where: 'answer is not matching("[0-9][.][0-9]{4,}")' },
  ],
  prompt: '{{ question | trim }}',
  instruction: lib.boxed,
  ground_truth: '{{ answer }}',
  extra_info: { category: 'category', difficulty: 'difficulty', answer_type: 'answer_type' },
  bad_rows: 'drop',
  rules: [
    lib.length { max_ground_truth_tokens: 30 },
    { type: 'exact_duplicates', loose: true },
    { type: 'near_duplicates', similarity: 0.9 },
    { type: 'contamination', against: lib.stem_test_sets, ngram: 13 },
  ],
}
