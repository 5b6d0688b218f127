// Guru's evaluation suite (configs/evaluations/guru.jsonnet) of its experiments: on all domains, and on one each, which
// says what the other five are good for. No published numbers: those of the paper are of other lengths of training.
local domains = import '../guru/domains.libsonnet';
local suite = (import '../evaluations/guru.jsonnet').evaluation.sets;
local alone(domain) = 'dapo_7b_' + domain;
local on_all = { '7b_grpo': '7B, GRPO', '32b_grpo': '32B, GRPO', '32b_ppo': '32B, PPO' };
local on_one = { [alone(domain)]: '7B, DAPO, %s alone' % domain for domain in domains.names };
{
  type: 'reproduction',
  name: 'guru_evaluation',
  title: 'Guru: one policy for many domains',
  directory: 'experiments/guru',
  seeds: [1],
  baseline: '7B, GRPO',
  experiments: { [name]: { configs: ['configs/guru/%s.jsonnet' % name] } for name in std.objectFields(on_all + on_one) },
  columns: [{ name: set.name, evaluation: set.name } for set in suite],
  rows: [
    { name: (on_all + on_one)[name], experiment: name }
    for name in ['7b_grpo', '32b_grpo', '32b_ppo'] + std.objectFields(on_one)
  ],
  panels: [{ name: set.name, evaluation: set.name } for set in suite if set.while_training],
  notes: [
    'Temperature 1, top-p 0.7; AIME 32 answers to a problem, small sets four, others one.',
    'Accuracy is the share of answers that are wholly right; zebra tables earn their share of right cells while training.',
  ],
}
