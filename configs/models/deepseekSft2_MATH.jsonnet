// DeepSeekMath-7B after the paper's supervised fine-tuning on MATH.
(import 'deepseek7b.jsonnet') + { model+: { name_or_path: 'realtreetune/deepseekmath-7b-sft-MATH-v2' } }
