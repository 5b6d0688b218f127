// One choice decides, the first of 48: the start model of longest.jsonnet.
(import '../lib/decisive.libsonnet')('longest').start
