(import 'setting.libsonnet')(
  import '../tasks/signposts_fork.jsonnet',
  name='fork',
  max_tokens=56,
  budget=400000,
)
