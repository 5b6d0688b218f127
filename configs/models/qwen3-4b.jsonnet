// The chat model Qwen/Qwen3-4B in place of an experiment's model. It answers without a thought.
(import 'chat_model.libsonnet')('qwen3-4b', 'Qwen/Qwen3-4B', { enable_thinking: false })
