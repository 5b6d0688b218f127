// The chat model Qwen/Qwen2.5-7B-Instruct in place of an experiment's model.
(import 'chat_model.libsonnet')('qwen2.5-7b-instruct', 'Qwen/Qwen2.5-7B-Instruct')
