// The VinePPO paper's ablation: how many continuations a value is the mean of (Rho-1.1B, MATH).
local paper = import 'vineppo_paper.libsonnet';
local source = 'Kazemnejad et al., arXiv:2410.01679v2: ablation of K';
local base = paper.experiments('rho', 'MATH', ['vineppo']);
local nine = paper.experiment('rho', 'MATH', 'vineppo');
local column = paper.column('rho', 'MATH');
paper.table {
  name: 'vineppo_k',
  title: 'VinePPO: continuations per state',
  baseline: 'K = 1',
  experiments: base {
    [nine + '_K1']: paper.variant(base[nine], '{ credit+: { samples: 1 } }', '_K1'),
    [nine + '_K3']: paper.variant(base[nine], '{ credit+: { samples: 3 } }', '_K3'),
  },
  columns: [{ name: column, evaluation: 'math_test', curve: 'math_validation' }],
  rows: [
    { name: 'K = 1', cells: { [column]: { experiment: nine + '_K1', published: 0.199, source: source } } },
    { name: 'K = 3', cells: { [column]: { experiment: nine + '_K3', published: 0.212, source: source } } },
    { name: 'K = 9', cells: { [column]: { experiment: nine, published: 0.230, source: source } } },
  ],
}
