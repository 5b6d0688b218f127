// The chat model meta-llama/Llama-3.2-1B-Instruct in place of an experiment's model.
// Its template writes today's date into the prompt; a fixed one keeps prompts the same.
(import 'chat_model.libsonnet')('llama-3.2-1b-instruct', 'meta-llama/Llama-3.2-1B-Instruct', { date_string: '26 Jul 2024' })
