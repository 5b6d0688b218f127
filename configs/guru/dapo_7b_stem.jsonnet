// DAPO on Guru's domain `stem` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('stem') + { experiment_name: 'guru/dapo_7b_stem' }
