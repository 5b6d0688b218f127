// GRPO on the domain `code` alone; the other four domains are only measured.
(import 'tiny_alone.libsonnet')('code')
