// DAPO on Guru's domain `simulation` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('simulation') + { experiment_name: 'guru/dapo_7b_simulation' }
