// TensorBoard with names that dashboards of verl have, in addition to those of this project. The names assume an
// evaluation set called test.
{ sinks+: [{ type: 'tensorboard', further_names: import 'verl_names.libsonnet' }] }
