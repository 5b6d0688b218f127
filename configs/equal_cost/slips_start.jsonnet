(import 'slips.libsonnet').start
