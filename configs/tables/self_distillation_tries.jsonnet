// Tries on a seed that no table has, from which self_distillation.jsonnet took its learning rate and its bound on the
// teacher's log-probability difference.
local try(config, name, label, settings) = { config: config, name: name, label: label, settings: settings };
local rate(config, name, learning_rate) =
  try(config, name + ', ' + learning_rate, learning_rate, '{ trainer+: { learning_rate: %s } }' % learning_rate);
local bound(config, name, clip) =
  try(config, '%s, bound %s' % [name, clip], 'bound_%s' % clip, '{ credit+: { clip: %s } }' % clip);

(import 'self_distillation.libsonnet')(
  [101],
  [rate('grpo', 'GRPO', learning_rate) for learning_rate in ['1e-4', '3e-4', '1e-3']]
  + [rate('opsd', 'OPSD, the policy teaches', learning_rate) for learning_rate in ['1e-4', '3e-4', '1e-3']]
  + [bound('opsd', 'OPSD, the policy teaches', clip) for clip in ['null', '1']]
  + [bound('opsd_start_teacher', 'OPSD, the start model teaches', clip) for clip in ['null', '1']]
  + [try('cpo', 'CPO', 'try', '{}'), try('grpo_measured', 'GRPO, KL measured', 'try', '{}')],
  { name: 'self_distillation_tries', title: 'Tries of learning rates and bounds' },
)
