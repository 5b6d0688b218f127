// Rows that hold a chat under `messages` and the reference answer under `extra_info.answer`, made into rows for the task
// `rows`:
//
//   treetune prepare_data data_pipelines/from_messages.jsonnet --input rows.jsonl --output data/mine
//
// The first message of the user is the problem. `data_source` chooses the grader: math__ is graded as mathematics.
{
  type: 'prepare_data',
  data_source: 'math__mine',
  ability: 'math',
  source: { type: 'files', train: 'rows.jsonl' },
  prompt: '{{ (messages | selectattr("role", "equalto", "user") | first).content }}',
  ground_truth: '{{ extra_info.answer }}',
}
