(import 'fork.libsonnet').start
