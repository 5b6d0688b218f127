// GRPO on the domain `words` alone; the other four domains are only measured.
(import 'tiny_alone.libsonnet')('words')
