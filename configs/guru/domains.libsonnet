// Guru's six domains: how many rows train on each source, and the task that a domain is. The files are those that
// `prepare_data` writes, with the configurations of configs/data, into data/guru/<domain>__<source>.
local graders = import 'graders.libsonnet';

// The routes of one domain alone, so that another's row among its files is refused and not graded.
local routes(domain) = {
  [source]: graders[source]
  for source in std.objectFields(graders)
  if source == domain || std.startsWith(source, domain + '_')
};

local rows = {
  math: { combined: 54400 },
  codegen: { leetcode2k: 1300, livecodebench: 440, primeintellect: 7500, taco: 8800 },
  logic: { arcagi1: 111, arcagi2: 190, barc: 1600, graph_logical: 1200, ordering_puzzle: 1900, zebra_puzzle: 1300 },
  simulation: { codeio: 3700 },
  table: { hitab: 4300, multihier: 1500 },
  stem: { web: 3600 },
};

{
  names: std.objectFields(rows),
  size(domain):: std.sum(std.objectValues(rows[domain])),
  all: std.sum([$.size(domain) for domain in $.names]),

  file(source, split):: 'data/guru/%s/%s.parquet' % [source, split],

  // What trains on a domain.
  task(domain):: {
    type: 'rows',
    train: [$.file('%s__%s' % [domain, source], 'train') for source in std.objectFields(rows[domain])],
    routes: routes(domain),
  },

  // What measures a source.
  test(source):: {
    type: 'rows',
    test: [$.file(source, 'test')],
    routes: routes(std.split(source, '__')[0]),
  },
}
