// DAPO on Guru's domain `math` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('math') + { experiment_name: 'guru/dapo_7b_math' }
