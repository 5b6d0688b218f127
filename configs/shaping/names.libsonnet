// Further configurations of this folder, each under its name: configs/shaping/NAME.jsonnet is the field NAME.
{
  // Up to 0.1 for what a correct answer's critical path saves of the median one among the other correct answers to the
  // problem. A thread that adds nothing saves nothing. Slower than the median is worth no less than the median (floor: 0).
  acceleration_group: { shaping+: [{
    type: 'acceleration',
    form: 'saved',
    reference: { type: 'group' },
    weight: 0.5,
    clip: 0.2,
    floor: 0,
  }] },

  // ThreadWeaver's reward as its code has it (reward v2 with the shipped settings, 1.0 * 0.5 and a clip of 0.2): a right
  // answer earns up to 0.1 more, by 1 - critical path / all of its own tokens; a wrong one earns -1. A thread that adds
  // nothing raises it. Counted on the response alone, where the reference takes the prompt along.
  acceleration_published_code: { shaping+: [
    { type: 'acceleration', form: 'saved', reference: { type: 'total' }, threads: 'written', weight: 0.5, clip: 0.2 },
    { type: 'wrong_answers', penalty: 1.0 },
  ] },

  // ThreadWeaver's reward as its README has it: a correct answer earns up to 0.1 more the shorter its critical path is
  // than all of its own tokens (total / critical path - 1), a wrong one nothing. A thread that adds nothing raises it.
  // Counted on the response alone, where the reference takes the prompt along.
  acceleration_published_readme: { shaping+: [
    { type: 'acceleration', form: 'ratio', reference: { type: 'total' }, threads: 'written', weight: 0.5, clip: 0.2 },
  ] },

  // Up to 0.1 for what a correct answer's critical path saves of the task's sequential solution to the same problem. A
  // thread that adds nothing saves nothing. Slower than sequential is worth no less than as slow (floor: 0).
  acceleration_sequential: { shaping+: [{
    type: 'acceleration',
    form: 'saved',
    reference: { type: 'sequential_demonstration' },
    weight: 0.5,
    clip: 0.2,
    floor: 0,
  }] },

  // Up to 0.1 for what a correct answer's critical path saves of the policy's own sequential answers: the running mean
  // per problem over correct answers that opened no block. Problems that were never answered so give nothing
  // (acceleration/without_reference).
  acceleration_sequential_running: { shaping+: [{
    type: 'acceleration',
    form: 'saved',
    reference: { type: 'sequential_running', decay: 0.8 },
    weight: 0.5,
    clip: 0.2,
    floor: 0,
  }] },

  // ThreadWeaver's group length penalty (off there): where 80 % or more of the answers to a problem are correct, up to 0.2
  // less for a critical path that is 10,000 tokens or more longer than the shortest correct one.
  group_length_penalty: { shaping+: [{ type: 'group_length_penalty', threshold: 0.8, weight: 0.2, window: 10000 }] },

  // The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3): among the answers to a problem, correct ones
  // earn up to 0.5 more the nearer they are to the shortest of all, and the longest of all 0.5 less.
  length_penalty: { shaping+: [{ type: 'length_penalty', weight: 1.0 }] },
}
