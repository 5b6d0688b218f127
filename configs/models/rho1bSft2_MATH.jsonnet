// Rho-1B after the paper's supervised fine-tuning on MATH.
(import 'rho1b.jsonnet') + { model+: { name_or_path: 'realtreetune/rho-1b-sft-MATH' } }
