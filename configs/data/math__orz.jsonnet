// Open-Reasoner-Zero's 57 thousand. Its file is a list of pairs of turns; how the hub's reader calls the two is not known for
// sure: look at a row where `expand` complains.
local lib = import 'lib.libsonnet';

lib.math {
  data_source: 'math__orz',
  source: lib.hub('Open-Reasoner-Zero/orz_math_57k_collection'),
  expand: 'treetune.data.expansions:orz_turns',
  prompt: '{{ question }}',
  ground_truth: '{{ answer }}',
}
