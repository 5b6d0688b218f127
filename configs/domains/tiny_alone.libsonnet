// alone(domain): GRPO on one of the five domains, the others only measured. An iteration has the problems of that domain
// that it has among the others, in the same order: what the others add is the only difference.
function(domain)
  local all = (import 'tiny_grpo.jsonnet');
  local weights = { [name]: std.get(all.task.domains[name], 'weight', 1) for name in std.objectFields(all.task.domains) };
  all + {
    experiment_name: 'domains/tiny_alone_' + domain,
    problems_per_iteration: all.problems_per_iteration * weights[domain] / std.sum(std.objectValues(weights)),
    task+: { domains+: { [name]+: { weight: 0 } for name in std.objectFields(weights) if name != domain } },
    evaluation+: { every: 10 },
  }
