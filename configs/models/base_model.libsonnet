// base_model(name, repository, begin_of_text): a base model, which needs supervised fine-tuning first.
function(name, repository, begin_of_text=false)
  (import 'pretrained.libsonnet')(name, repository, { begin_of_text: begin_of_text })
