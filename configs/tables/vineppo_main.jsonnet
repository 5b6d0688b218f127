// The VinePPO paper's main results: six methods and their start, two data sets, two models.
local paper = import 'vineppo_paper.libsonnet';
local figure = 'Kazemnejad et al., arXiv:2410.01679: labels of its main figure';
local second = 'Kazemnejad et al., arXiv:2410.01679v2';
local methods = ['restem', 'dpo_positive', 'ppo', 'grpo', 'rloo', 'vineppo'];
local cells = [
  { model: 'rho', task: 'GSM8K' },
  { model: 'rho', task: 'MATH' },
  { model: 'deepseek', task: 'GSM8K' },
  { model: 'deepseek', task: 'MATH' },
];
local published = {
  sft: [0.403, 0.155, 0.696, 0.328],
  restem: [0.428, 0.173, 0.720, 0.349],
  dpo_positive: [0.464, 0.192, 0.744, 0.376],
  ppo: [0.501, 0.181, 0.789, 0.428],
  grpo: [null, null, null, 0.364],
  rloo: [null, null, null, 0.368],
  vineppo: [0.534, 0.230, 0.801, 0.460],
};
local row(method, name, source) = {
  name: name,
  cells: {
    [paper.column(cells[i].model, cells[i].task)]: {
      experiment: if method == 'sft' then paper.sft(cells[i].model, cells[i].task)
      else paper.experiment(cells[i].model, cells[i].task, method),
    } + if published[method][i] == null then {} else { published: published[method][i], source: source }
    for i in std.range(0, 3)
  },
};
paper.table {
  name: 'vineppo_main',
  title: 'VinePPO: main results, pass@1',
  baseline: 'PPO',
  experiments: std.foldl(
    function(all, cell) all + paper.experiments(cell.model, cell.task, methods), cells, {}
  ),
  columns: [
    {
      name: paper.column(cell.model, cell.task),
      evaluation: '%s_test' % std.asciiLower(cell.task),
      curve: '%s_validation' % std.asciiLower(cell.task),
    }
    for cell in cells
  ],
  rows: [row('sft', 'SFT', figure)] + [
    row(method, paper.methods[method], if method == 'grpo' || method == 'rloo' then second else figure)
    for method in methods
  ],
  notes: ['16 answers to a problem at temperature 0.35, top-p 0.9; MATH: the 500 problems of the OpenAI split.'],
}
