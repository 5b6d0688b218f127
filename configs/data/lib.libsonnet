// Shared by the configurations of data sets: where answers go, how long prompts may be, which test sets training
// rows are compared with.
local test_set(name, hub, text, split='test', subset=null, revision='main') = {
  name: name,
  source: { type: 'hub', name: hub, revision: revision, [split]: split } + (if subset == null then {} else { subset: subset }),
  split: split,
  text: text,
};

{
  boxed: ' Please output the final answer within \\boxed{}.',

  choice: ' Reason step by step, then put the letter of your choice alone into \\boxed{}.',
  python: '\n\nWrite the answer into one block ```python ... ```.',

  // A problem with a program or a function to write, with its starter code if it has some.
  program_of(field):: |||
    {{ %s | trim }}
    {%% if starter_code is defined and starter_code and (starter_code | trim) %%}
    Use this starter code:

    ```python
    {{ starter_code | trim }}
    ```
    {%% endif %%}
    Write the whole program or function into one block ```python ... ```.
  ||| % field,
  program: self.program_of('problem'),
  complete: |||
    Complete this function:

    ```python
    {{ prompt | trim }}
    ```

    Write all of it into one block ```python ... ```.
  |||,

  // The data set's own solution is run against its own tests, in the sandbox.
  own_solution: {
    type: 'reference_solutions',
    grader: { type: 'code' },
    answer: '{% if "```" in reference %}{{ reference }}{% else %}```python\n{{ reference }}\n```{% endif %}',
    without: 'drop',
    deadline: 60,
  },

  // Prompts of at most 4,096 tokens less 100 for what a chat template adds, by Qwen2.5's tokenizer.
  length: {
    type: 'length',
    model: { type: 'pretrained', name_or_path: 'Qwen/Qwen2.5-7B' },
    max_prompt_tokens: 3996,
  },

  // A data set of the Hugging Face hub. Name a commit for `revision` once you have looked at what you got: `main` is
  // another data set tomorrow.
  hub(name, subset=null, revision='main', files=null, train='train', validation=null, test=null):: {
    type: 'hub',
    name: name,
    revision: revision,
    train: train,
    validation: validation,
    test: test,
    subset: subset,
    files: files,
  },

  // The rows that the Guru data set has for a source, which have this schema already: those to train on and, where it has
  // some, those to measure on. That its repository has its evaluation sets under these names is from scripts that
  // read them: a name that has changed is reported when it is fetched.
  guru(train, test=null):: $.hub(
    'LLM360/guru-RL-92k',
    files={ train: 'train/' + train } + (if test == null then {} else { test: test }),
    test=if test == null then null else 'test',
  ),
  from_guru(train, test=null):: {
    type: 'prepare_data',
    copy: true,
    source: $.guru(train, test),
    splits: if test == null then ['train'] else ['train', 'test'],
    rules: [$.length],
  },

  math_test_sets: [
    test_set('aime24', 'HuggingFaceH4/aime_2024', '{{ problem }}', split='train'),
    test_set('aime25', 'math-ai/aime25', '{{ problem }}'),
    test_set('amc', 'AI-MO/aimo-validation-amc', '{{ problem }}', split='train'),
    test_set('math500', 'HuggingFaceH4/MATH-500', '{{ problem }}'),
    test_set('minerva', 'math-ai/minervamath', '{{ question }}'),
    test_set('olympiadbench', 'Hothan/OlympiadBench', '{{ question }}', split='train', subset='OE_TO_maths_en_COMP'),
  ],
  code_test_sets: [
    test_set('humaneval', 'openai/openai_humaneval', '{{ prompt }}'),
    test_set('mbpp', 'google-research-datasets/mbpp', '{{ text }}', subset='full'),
    test_set('livecodebench', 'agentica-org/DeepCoder-Preview-Dataset', '{{ problem }}', subset='lcbv5'),
  ],

  stem_test_sets: [
    test_set('gpqa', 'Idavidrein/gpqa', '{{ Question }}', split='train', subset='gpqa_main'),
    test_set('supergpqa', 'm-a-p/SuperGPQA', '{{ question }}', split='train'),
  ],

  // Mathematics: answers in a box, no two rows that ask the same, nothing that is measured on.
  math: {
    type: 'prepare_data',
    ability: 'math',
    instruction: $.boxed,
    bad_rows: 'drop',
    rules: [
      { type: 'length', name: 'short answers', max_ground_truth_characters: 100 },
      $.length,
      { type: 'exact_duplicates', loose: true },
      { type: 'near_duplicates', similarity: 0.9 },
      { type: 'contamination', against: $.math_test_sets, ngram: 13 },
    ],
  },

  // Programs: the data set's own solution has to pass its own tests.
  code: {
    type: 'prepare_data',
    ability: 'codegen',
    bad_rows: 'drop',
    rules: [
      $.length,
      { type: 'exact_duplicates', loose: true },
      { type: 'near_duplicates', similarity: 0.9 },
      { type: 'contamination', against: $.code_test_sets, ngram: 13 },
    ],
  },

  // What is measured on: nothing is dropped but what is too long to ask.
  test: {
    type: 'prepare_data',
    splits: ['test'],
    rules: [$.length],
  },

  // A test set of mathematics with the fields `problem` and `answer`.
  math_test(data_source, source):: $.test {
    data_source: data_source,
    ability: 'math',
    source: source,
    instruction: $.boxed,
    prompt: '{{ problem }}',
    ground_truth: '{{ answer }}',
  },

  // HumanEval's functions to complete, with the tests of one of its copies.
  humaneval(data_source, repository):: $.test {
    data_source: data_source,
    ability: 'codegen',
    source: $.hub(repository, train=null, test='test'),
    prompt: $.complete,
    ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ entry_point ~ ")"} | json }}',
    // The stub before the answer has the imports and helpers that an answer may leave out.
    extra_info: { prefix: 'prompt ~ "    pass\\n"', reference: 'prompt ~ canonical_solution' },
    rules+: [$.own_solution],
  },

  // GPQA. The order of the choices is drawn by the seed. The data set asks for an agreement on the hub.
  gpqa(data_source, subset):: $.test {
    data_source: data_source,
    ability: 'stem',
    source: $.hub('Idavidrein/gpqa', subset=subset, train=null, test='train'),
    expand: 'treetune.data.expansions:shuffled_choices',
    prompt: '{{ Question | trim }}\n{{ choices }}',
    instruction: $.choice,
    ground_truth: '{{ letter }}',
  },

  // LiveBench's questions of June and July 2024. The grader `livebench` goes by `task`.
  livebench(category):: $.test {
    data_source: 'ood__livebench_' + category,
    ability: 'ood',
    source: $.hub('livebench/' + category, train=null, test='test'),
    filters: [
      { name: 'other months', where: '(livebench_release_date | string)[:7] in ("2024-06", "2024-07")' },
      { name: 'no answer', where: 'ground_truth is not none' },
    ],
    prompt: '{{ turns[0] }}',
    ground_truth: '{{ ground_truth }}',
    extra_info: { category: 'category', task: 'task' },
  },
}
