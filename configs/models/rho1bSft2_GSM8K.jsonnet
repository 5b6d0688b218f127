// Rho-1B after the paper's supervised fine-tuning on GSM8K.
(import 'rho1b.jsonnet') + { model+: { name_or_path: 'realtreetune/rho-1b-sft-GSM8K' } }
