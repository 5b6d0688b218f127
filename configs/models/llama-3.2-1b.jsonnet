// The base model meta-llama/Llama-3.2-1B in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('llama-3.2-1b', 'meta-llama/Llama-3.2-1B', begin_of_text=true)
