(import 'fork.libsonnet').on_policy
