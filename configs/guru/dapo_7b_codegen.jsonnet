// DAPO on Guru's domain `codegen` alone, from Qwen2.5-7B.
(import 'dapo_7b.libsonnet')('codegen') + { experiment_name: 'guru/dapo_7b_codegen' }
