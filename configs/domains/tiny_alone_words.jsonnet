(import 'tiny_alone.libsonnet')('words')
