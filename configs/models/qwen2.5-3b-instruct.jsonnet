// The chat model Qwen/Qwen2.5-3B-Instruct in place of an experiment's model.
(import 'chat_model.libsonnet')('qwen2.5-3b-instruct', 'Qwen/Qwen2.5-3B-Instruct')
