// The chat model Qwen/Qwen3-8B in place of an experiment's model. It answers without a thought.
(import 'chat_model.libsonnet')('qwen3-8b', 'Qwen/Qwen3-8B', { enable_thinking: false })
