// The chat model Qwen/Qwen3-1.7B in place of an experiment's model. It answers without a thought.
(import 'chat_model.libsonnet')('qwen3-1.7b', 'Qwen/Qwen3-1.7B', { enable_thinking: false })
