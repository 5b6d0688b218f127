// A preset's entry about itself: its name, the kind of experiment that it is for, and the keys that files before it set.
// With it, two presets, one on another kind of experiment, and one that a later experiment overrides are refused.
function(name, on='sampled answers') {
  local after = [key for key in ['task', 'model', 'rollout', 'trainer'] if key in super],
  presets+: [{ name: name, on: on, after: after }],
}
