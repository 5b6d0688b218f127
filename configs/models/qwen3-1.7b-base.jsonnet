// The base model Qwen/Qwen3-1.7B-Base in place of an experiment's model. Supervised fine-tuning comes first.
(import 'base_model.libsonnet')('qwen3-1.7b-base', 'Qwen/Qwen3-1.7B-Base')
