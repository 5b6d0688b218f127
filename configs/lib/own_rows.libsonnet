// own_rows(rows, prompt, answer, alphabet, supervised): what an experiment has to know of rows of one's own, for its right.
// There are so many rows to train on; the longest prompt and answer have so many characters. `alphabet` is for models of
// characters: all that occur; null: the model has a tokenizer of its own. `supervised` where it learns from the golds.
function(rows, prompt, answer, alphabet=null, supervised=false) (
  local tiny = alphabet != null;
  local max_tokens = if tiny then answer + 16 else 512;
  {
    context_length: if tiny then prompt + max_tokens + 8 else std.max(2048, super.context_length),
    evaluation+: {
      rollout: if supervised then { type: 'single_turn', max_tokens: max_tokens } else null,
      sets: [
        { name: 'validation', split: 'validation', samples: 4, while_training: true },
        { name: 'test', split: 'test', samples: 4 },
      ],
    },
  } + (
    if supervised then {
      [if tiny then 'model']+: { alphabet: alphabet, context_length: prompt + max_tokens + 8 },
      problems_per_iteration: null,
      problem_sampling: 'epochs',
      trainer+: { minibatch_size: std.min(rows, 16), schedule: { type: 'warmup', ratio: 0.03 } },
    } else {
      rollout+: { max_tokens: max_tokens },
      problems_per_iteration:
        if super.problems_per_iteration == null then null else std.min(std.ceil(rows / 2), super.problems_per_iteration),
    }
  )
)
