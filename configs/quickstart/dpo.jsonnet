// DPO: DPO-positive without the term that keeps the right answers likely.
(import 'dpo_positive.jsonnet')
+ {
  experiment_name: 'quickstart/dpo',
  trainer+: { objective: { type: 'dpo', beta: 0.3 } },
}
