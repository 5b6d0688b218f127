// Further models, for the right of an experiment: configs/models/NAME.jsonnet is the field NAME.

local pretrained(name, repository, more) = {
  model: { type: 'pretrained', name_or_path: repository, dtype: 'bfloat16', attention: 'sdpa' } + more,
  context_length: 4096,
  experiment_name+: '_' + name,
};

// The base model: supervised fine-tuning first.
local base(name, repository, begin_of_text=false) = {
  [name]: pretrained(name, repository, { begin_of_text: begin_of_text }),
};

// A model that chats, asked in its template.
local chat(name, repository, template={}) = {
  [name]: (import 'asked_in_chat.libsonnet') + pretrained(
    name, repository, { chat: if template == {} then {} else { template_arguments: template } }
  ),
};
local without_thinking = { enable_thinking: false };

base('llama-3.2-1b', 'meta-llama/Llama-3.2-1B', begin_of_text=true)
+ base('qwen2.5-1.5b', 'Qwen/Qwen2.5-1.5B')
+ base('qwen2.5-7b', 'Qwen/Qwen2.5-7B')
+ base('qwen2.5-32b', 'Qwen/Qwen2.5-32B')
+ base('qwen3-1.7b-base', 'Qwen/Qwen3-1.7B-Base')
+ base('qwen3-4b-base', 'Qwen/Qwen3-4B-Base')
+ chat('llama-3.2-1b-instruct', 'meta-llama/Llama-3.2-1B-Instruct', { date_string: '26 Jul 2024' })  // a fixed date
+ chat('qwen2.5-1.5b-instruct', 'Qwen/Qwen2.5-1.5B-Instruct')
+ chat('qwen3-1.7b', 'Qwen/Qwen3-1.7B', without_thinking)
+ chat('qwen3-4b', 'Qwen/Qwen3-4B', without_thinking)
+ chat('qwen3-8b', 'Qwen/Qwen3-8B', without_thinking)
