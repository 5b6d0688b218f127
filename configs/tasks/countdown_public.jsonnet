// The rows that the single-file GRPO trains on, for the right of an experiment with problems made here: asked and
// graded as those are. They come in one split, of which 500 are held out for validation; test sets keep the problems
// that they had, and are asked and graded as the rows are, whatever comes further to the right. Put the commit that
// you get for `revision`, so that it is the same tomorrow.
local asked_and_graded(task) = { [key]: task[key] for key in ['prompt', 'grader'] if std.objectHas(task, key) };

{
  local made = if 'task' in super then super.task else null,
  task: {
    type: 'countdown_rows',
    source: { type: 'hub', name: 'Majis699/countdown-0', revision: 'main', validation: null, test: null },
    validation_size: 500,
  } + (if made == null then {} else asked_and_graded(made)),
  evaluation+: if made == null then {} else {
    sets: [
      one + (if one.split == 'test' then { task: made + asked_and_graded($.task) } else {})
      for one in super.sets
    ],
  },
}
