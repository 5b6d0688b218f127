// LiveBench, reasoning: the questions of June and July 2024. The grader `livebench` goes by `task`.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'ood__livebench_reasoning',
  ability: 'ood',
  source: lib.hub('livebench/reasoning', train=null, test='test'),
  filters: [
    { name: 'other months', where: '(livebench_release_date | string)[:7] in ("2024-06", "2024-07")' },
    { name: 'no answer', where: 'ground_truth is not none' },
  ],
  prompt: '{{ turns[0] }}',
  ground_truth: '{{ ground_truth }}',
  extra_info: { category: 'category', task: 'task' },
}
