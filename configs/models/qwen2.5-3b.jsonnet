// The base model Qwen/Qwen2.5-3B in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('qwen2.5-3b', 'Qwen/Qwen2.5-3B')
