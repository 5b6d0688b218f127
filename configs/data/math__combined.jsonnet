// Guru's mathematics: DAPO and Skywork-OR1, duplicates out, answers of at most 100 characters, filtered by difficulty: 54,404
// rows, which have this schema already.
local lib = import 'lib.libsonnet';

{
  type: 'prepare_data',
  data_source: 'math__combined',
  ability: 'math',
  copy: true,
  source: lib.guru('math__combined_54.4k.parquet'),
  rules: [lib.length, { type: 'contamination', against: lib.math_test_sets, ngram: 13 }],
}
