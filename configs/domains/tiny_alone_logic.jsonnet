// GRPO on the domain `logic` alone; the other four domains are only measured.
(import 'tiny_alone.libsonnet')('logic')
