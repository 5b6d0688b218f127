(import 'slips.libsonnet').on_policy
