// TensorBoard with the names that ThreadWeaver's README has for its metrics, in addition to those of this project.
{ sinks+: [{ type: 'tensorboard', further_names: import 'threadweaver_names.libsonnet' }] }
