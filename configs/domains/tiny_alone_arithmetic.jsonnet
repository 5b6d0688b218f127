// GRPO on the domain `arithmetic` alone; the other four domains are only measured.
(import 'tiny_alone.libsonnet')('arithmetic')
