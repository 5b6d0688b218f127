// Guru's evaluation suite: temperature 1, top-p 0.7, answers of 28,672 tokens after prompts of 4,096; ARC's prompts are
// longer and share the context evenly. Sets of up to 400 problems are sampled four times or more (AIME, which
// the original's file holds eight times: 32), one of more than 1,000 is measured on 1,000 of its problems.
//
// While training, one set of each domain is measured.
local domains = import '../guru/domains.libsonnet';

local set(source, samples=4, problems=null, max_tokens=28672, while_training=false) = {
  name: std.split(source, '__')[1],
  split: 'test',
  task: domains.test(source),
  samples: samples,
  problems: problems,
  choose: 'random',
  max_tokens: max_tokens,
  while_training: while_training,
  temperature: 1.0,
  top_p: 0.7,
};

{
  evaluation+: {
    sets: [
      set('math__aime24', samples=32),
      set('math__math500', samples=1, while_training=true),
      set('codegen__humaneval', while_training=true),
      set('codegen__mbpp', samples=1),
      set('codegen__livecodebench'),
      set('stem__gpqa_diamond', while_training=true),
      set('stem__supergpqa'),
      set('logic__arcagi1', max_tokens=16384),
      set('logic__zebra_puzzle', while_training=true),
      set('simulation__codeio', while_training=true),
      set('simulation__cruxeval_i', samples=1),
      set('simulation__cruxeval_o', samples=1),
      set('table__finqa', samples=1, problems=1000),
      set('table__hitab', while_training=true),
      set('table__multihier'),
      set('ood__livebench_reasoning'),
      set('ood__livebench_language'),
      set('ood__livebench_data_analysis'),
      set('ood__ifeval', samples=1),
    ],
  },
}
