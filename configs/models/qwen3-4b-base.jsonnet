// The base model Qwen/Qwen3-4B-Base in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('qwen3-4b-base', 'Qwen/Qwen3-4B-Base')
