// The same experiment as restem.py, composed of treetune's parts.
(import '../../configs/quickstart/restem.jsonnet')
+ (import 'small.libsonnet')
+ { iterations: 4, choose_checkpoint: null }
