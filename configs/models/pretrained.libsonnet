// pretrained(name, repository, settings): a model of the Hugging Face hub, for the right of an experiment. `settings` are
// further keys of its `model`.
function(name, repository, settings) {
  model: { type: 'pretrained', name_or_path: repository, dtype: 'bfloat16', attention: 'sdpa' } + settings,
  context_length: 4096,
  experiment_name+: '_' + name,
}
