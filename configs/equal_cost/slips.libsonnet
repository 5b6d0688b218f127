(import 'setting.libsonnet')(
  import '../tasks/signposts_slips.jsonnet',
  name='slips',
  max_tokens=56,
  budget=400000,
)
