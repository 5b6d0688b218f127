// What the quickstart's policy-gradient methods share: everything but the credit.
(import 'base.jsonnet')
+ (import '../rollouts/short_answers.jsonnet')
+ (import '../trainers/one_step.jsonnet')
+ {
  model: { type: 'pretrained', name_or_path: $.directory + '/quickstart/sft/checkpoints/last/policy' },
  iterations: 25,
  checkpoints: { every: 5, keep_every: 5 },
}
