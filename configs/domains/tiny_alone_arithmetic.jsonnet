(import 'tiny_alone.libsonnet')('arithmetic')
