// The chat model HuggingFaceTB/SmolLM2-135M-Instruct in place of an experiment's model: small enough for a laptop's CPU.
// Without the hub, `python scripts/pretrained_135m.py` makes the folder pretrained/SmolLM2-135M-Instruct of it.
(import 'chat_model.libsonnet')('smollm2-135m-instruct', 'HuggingFaceTB/SmolLM2-135M-Instruct')
