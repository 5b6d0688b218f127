// own_rows(about): a task of rows of one's own in train.jsonl and test.jsonl, graded by `score` in reward.py, and what an
// experiment on the left has to know of them. `treetune new` writes the call: names of the fields, how many rows there are
// to train on and are held out for validation, characters of the longest problem and gold, all characters that occur for a
// model of characters (null: the model has a tokenizer), and whether the golds are what is learned from.
function(about) (
  local tiny = about.alphabet != null;
  local max_tokens = if tiny then about.longest_gold + 16 else 512;
  local tiny_context = about.longest_problem + max_tokens + 8;
  {
    task: {
      type: 'gsm8k',
      train: ['train.jsonl'],
      test: ['test.jsonl'],
      validation_size: about.held_out,
      problem_field: about.problem,
      gold_field: about.gold,
      prompt:
        if tiny then '{problem}' else '{problem}\nReason step by step, and end with a line "#### " and the answer.\n',
      grader: { type: 'function', path: 'reward:score' },
    },
    context_length: if tiny then tiny_context else std.max(2048, super.context_length),
    evaluation+: {
      rollout: if about.supervised then { type: 'single_turn', max_tokens: max_tokens } else null,
      sets: [
        { name: 'validation', split: 'validation', samples: 4, while_training: true },
        { name: 'test', split: 'test', samples: 4 },
      ],
    },
  } + (
    if about.supervised then {
      [if tiny then 'model']+: { alphabet: about.alphabet, context_length: tiny_context },
      problems_per_iteration: null,
      problem_sampling: 'epochs',
      trainer+: { minibatch_size: std.min(about.rows, 16), schedule: { type: 'warmup', ratio: 0.03 } },
    } else {
      rollout+: { max_tokens: max_tokens },
      problems_per_iteration:
        if super.problems_per_iteration == null then null
        else std.min(std.ceil(about.rows / 2), super.problems_per_iteration),
    }
  )
)
