// The single-file GRPO on Countdown, from Qwen2.5-3B.
(import 'single_file_grpo.libsonnet')
+ {
  experiment_name: 'countdown/qwen2.5-3b_grpo',
  model+: { name_or_path: 'Qwen/Qwen2.5-3B' },
}
