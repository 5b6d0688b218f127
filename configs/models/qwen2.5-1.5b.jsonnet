// The base model Qwen/Qwen2.5-1.5B in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('qwen2.5-1.5b', 'Qwen/Qwen2.5-1.5B')
