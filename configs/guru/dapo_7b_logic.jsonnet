// DAPO on Guru's domain `logic` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('logic') + { experiment_name: 'guru/dapo_7b_logic' }
