// The base model Qwen/Qwen2.5-32B in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('qwen2.5-32b', 'Qwen/Qwen2.5-32B')
