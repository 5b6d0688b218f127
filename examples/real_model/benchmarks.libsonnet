// To append to grpo.jsonnet or vineppo.jsonnet: the held-out sums greedily, 60 problems of GSM8K and 40 of MATH-500.
local only_test = { train: [], validation_size: null, stop: [] };
local steps = '{problem}\n\nReason step by step, ';
{
  context_length: 640,
  evaluation: {
    sets: [
      { name: 'test_greedy', split: 'test', problems: 100, temperature: 0 },
      {
        name: 'gsm8k',
        split: 'test',
        problems: 60,
        temperature: 0,
        max_tokens: 192,
        task: (import 'tasks/gsm8k.jsonnet').task + only_test + {
          prompt: steps + 'one step a line, and end with a line "#### " and the answer.',
          grader: { type: 'numeric', without_marker: 'last_number' },
        },
      },
      {
        name: 'math500',
        split: 'test',
        problems: 40,
        temperature: 0,
        max_tokens: 192,
        task: (import 'tasks/math.jsonnet').task + only_test + {
          prompt: steps + 'and put your final answer within \\boxed{}.',
        },
      },
    ],
  },
}
