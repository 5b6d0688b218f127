// tiny_alone(domain): GRPO on one of the five domains; the others are only measured. An iteration has the problems of that
// domain that it has in tiny_grpo.jsonnet, in the same order: what the other domains add is the only difference.
local all = import 'tiny_grpo.jsonnet';
local weights = { [name]: std.get(all.task.domains[name], 'weight', 1) for name in std.objectFields(all.task.domains) };

function(domain) all + {
  experiment_name: 'domains/tiny_alone_' + domain,
  problems_per_iteration: all.problems_per_iteration * weights[domain] / std.sum(std.objectValues(weights)),
  task+: { domains+: { [name]+: { weight: 0 } for name in std.objectFields(weights) if name != domain } },
  evaluation+: { every: 10 },
}
