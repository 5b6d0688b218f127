(import 'tiny_alone.libsonnet')('logic')
