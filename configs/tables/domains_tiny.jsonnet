// Five domains and a tiny model, three seeds: GRPO and VinePPO trained on all domains, compared with the start model and with
// GRPO on each domain alone, with the same problems of it.
local domains = ['arithmetic', 'logic', 'grids', 'code', 'words'];
local after_sft(name) = { configs: ['configs/domains/tiny_%s.jsonnet' % name], needs: ['sft'] };
{
  type: 'reproduction',
  name: 'domains_tiny',
  title: 'Five domains at once: a tiny model',
  directory: 'experiments/domains_tiny',
  seeds: [1, 2, 3],
  baseline: 'SFT',
  experiments: {
    sft: { configs: ['configs/domains/tiny_sft.jsonnet'] },
    grpo: after_sft('grpo'),
    vineppo: after_sft('vineppo'),
  } + { ['alone_' + domain]: after_sft('alone_' + domain) for domain in domains },
  columns: [
    { name: domain, evaluation: 'test', value: 'domains/%s/pass_at_1' % domain }
    for domain in domains
  ],
  rows: [
    { name: 'SFT', experiment: 'sft' },
    { name: 'GRPO on all', experiment: 'grpo' },
    { name: 'VinePPO on all', experiment: 'vineppo' },
  ] + [{ name: 'GRPO on %s alone' % domain, experiment: 'alone_' + domain } for domain in domains],
  panels: [
    { name: domain, evaluation: 'validation', value: 'domains/%s/pass_at_1' % domain }
    for domain in domains
  ],
  notes: [
    'All begin with the weights of SFT. Held-out problems, answers sampled as in training (temperature 1).',
    'A run on one domain alone has the same problems of it in the same iterations as the runs on all, and nothing else.',
  ],
}
