// DAPO on Guru's domain `table` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('table') + { experiment_name: 'guru/dapo_7b_table' }
