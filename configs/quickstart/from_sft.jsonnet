// What the quickstart's methods share: they go on from the SFT experiment's last checkpoint.
(import 'base.jsonnet')
+ (import '../rollouts/short_answers.jsonnet')
+ {
  model: { type: 'pretrained', name_or_path: $.directory + '/quickstart/sft/checkpoints/last/policy' },
}
