// The experiment of restem.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/restem.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 4, choose_checkpoint: null }  // always the weights after the last epoch
