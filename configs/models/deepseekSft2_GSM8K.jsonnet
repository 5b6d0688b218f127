// DeepSeekMath-7B after the paper's supervised fine-tuning on GSM8K.
(import 'deepseek7b.jsonnet') + { model+: { name_or_path: 'realtreetune/deepseekmath-7b-sft-GSM8K' } }
