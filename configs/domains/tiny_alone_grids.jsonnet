(import 'tiny_alone.libsonnet')('grids')
