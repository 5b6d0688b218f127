// RestEM (Singh et al., arXiv:2312.06585) as in the VinePPO paper: answers of the chosen policy that were right, at
// most 10 to a problem; eight epochs from the fine-tuned weights anew, each answer weighing the same.
(import '../runtimes/policy_iteration.jsonnet')
+ (import '../rollouts/paper_sampling.jsonnet')
+ (import '../rollouts/all_problems_x8.jsonnet')
+ (import '../trainers/adamw_lr1e-6.jsonnet')
+ (import '../analyzers/kl_to_reference.jsonnet')
+ {
  credit: { type: 'none' },
  selection: { type: 'correct_only', max_per_problem: 10 },
  trainer+: { objective: { type: 'mle', aggregation: 'sequence' }, epochs: 8 },
  iterations: 10,
  restart: 'every_iteration',
  choose_checkpoint: {
    set: [one.name for one in $.evaluation.sets if one.split == 'validation'][0],
    rule: 'first_maximum',
  },
}
