// Five domains for a tiny model, each with its own grader and a teacher who makes mistakes: sums, orders from clues,
// grids that rules change, programs that a sandbox runs, and words backwards from reasoning_gym. What all experiments
// on them share.
local held_out = { validation_size: 100, test_size: 200 };
local after_sign = { opening: '#', closing: '\n', unclosed: true };
(import '../models/tiny.jsonnet')
+ (import '../engines/vllm_cpu.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 1,
  model+: { layers: 3, hidden_size: 96, heads: 3, intermediate_size: 256, context_length: 80 },
  context_length: 80,
  task: {
    type: 'mixture',
    domains: {
      // 3+5+9+2=
      arithmetic: {
        task: held_out + {
          type: 'addition_chain',
          count: 4,
          digits: 1,
          demonstration_noise: 0.25,
          train_size: 300,
          validation_size: 60,
          test_size: 130,
        },
      },
      // cdf:d<f,c/f>
      logic: {
        task: held_out + {
          type: 'ordering_puzzles',
          wording: 'symbols',
          objects: [3, 3],
          clues: ['left', 'next'],
          letters: 8,
          demonstration_noise: 0.4,
          train_size: 1500,
          grader: { type: 'ordering' } + after_sign,
        },
      },
      // mft:12/34>
      grids: {
        task: held_out + {
          type: 'grid_puzzles',
          wording: 'symbols',
          rows: [2, 2],
          columns: [2, 2],
          colours: 6,
          shown: 0,
          steps: [2, 2],
          rules: ['mirror', 'flip', 'turn', 'transpose'],
          demonstration_noise: 0.3,
          train_size: 10000,
          grader: { type: 'grid' } + after_sign,
        },
      },
      // add 3,square:   (half as often as the others: each answer is a process)
      code: {
        weight: 0.5,
        task: held_out + {
          validation_size: 100,
          test_size: 100,
          type: 'short_programs',
          wording: 'symbols',
          steps: [2, 3],
          demonstration_noise: 0.25,
          train_size: 10000,
          grader: { type: 'code', blocks: 'whole' },
        },
      },
      // oaky>
      words: {
        task: held_out + {
          type: 'reasoning_gym',
          dataset: 'spell_backward',
          config: { min_word_len: 3, max_word_len: 4 },
          question: 'nus\\): (\\w+)',
          prompt: '{question}>',
          demonstration_noise: 0.3,
          train_size: 2000,
          grader: { type: 'reasoning_gym' } + after_sign,
        },
      },
    },
  },
  evaluation: {
    every: 5,
    rollout: { type: 'single_turn', max_tokens: 48 },
    sets: [
      { split: 'validation', problems: 100, samples: 4, while_training: true },
      { split: 'test', samples: 2 },
    ],
  },
}
