// The grader of a row of Guru by the beginning of its data_source; the longest that fits counts. Published scorers guess,
// accept answers that are a hundred times too large or reward what the question gives: these don't (docs/rewards.md).
{
  math: { type: 'math' },
  codegen: { type: 'code' },
  simulation__codeio: { type: 'codeio' },
  simulation__cruxeval: { type: 'cruxeval' },
  simulation__arcagi: { type: 'grid' },
  simulation__barc: { type: 'grid' },
  logic__arcagi: { type: 'grid' },
  logic__barc: { type: 'grid' },
  logic__zebra_puzzle: { type: 'zebra' },
  logic__ordering_puzzle: { type: 'ordering' },
  logic__graph_logical: { type: 'one_word' },
  table: { type: 'table' },
  stem__gpqa: { type: 'multiple_choice' },
  stem__supergpqa: { type: 'multiple_choice' },
  // Published: a model's verdict (tasks/guru_stem_judged.jsonnet).
  stem__web: { type: 'math' },
  // By the row's `task`.
  ood__livebench: { type: 'livebench' },
  ood__ifeval: { type: 'instruction_following' },
}
