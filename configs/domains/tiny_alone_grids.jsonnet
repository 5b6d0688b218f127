// GRPO on the domain `grids` alone; the other four domains are only measured.
(import 'tiny_alone.libsonnet')('grids')
