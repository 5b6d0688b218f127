// GPQA Diamond: 198 questions. The data set asks for an agreement on the hub. The order of the choices is drawn by the seed.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'stem__gpqa_diamond',
  ability: 'stem',
  source: lib.hub('Idavidrein/gpqa', subset='gpqa_diamond', train=null, test='train'),
  expand: 'treetune_data.expansions:shuffled_choices',
  prompt: '{{ Question | trim }}\n{{ choices }}',
  instruction: lib.choice,
  ground_truth: '{{ letter }}',
}
