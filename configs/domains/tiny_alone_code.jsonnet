(import 'tiny_alone.libsonnet')('code')
