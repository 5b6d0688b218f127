// What the quickstart's policy-gradient methods share: everything but the credit.
(import 'from_sft.jsonnet')
+ (import '../trainers/one_step.jsonnet')
+ {
  iterations: 25,
  checkpoints: { every: 5, keep_every: 5 },
}
