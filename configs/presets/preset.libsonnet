// What a preset says of itself: its name, what it goes on, and which of an experiment's parts stood on its left. Two of
// them, one on another kind of experiment, and one that an experiment on its right overrides are refused by that.
function(name, on='sampled answers') {
  local after = [key for key in ['task', 'model', 'rollout', 'trainer'] if key in super],
  presets+: [{ name: name, on: on, after: after }],
}
