// Data sets that prepare_data makes rows of: configs/data/NAME.jsonnet is the field NAME.
local lib = import 'data/lib.libsonnet';

local math_test(name, source) = lib.test {
  data_source: name,
  ability: 'math',
  source: source,
  instruction: lib.boxed,
  prompt: '{{ problem }}',
  ground_truth: '{{ answer }}',
};

local humaneval(name, repository) = lib.test {
  data_source: name,
  ability: 'codegen',
  source: lib.hub(repository, train=null, test='test'),
  prompt: lib.complete,
  ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ entry_point ~ ")"} | json }}',
  // The stub before the answer has the imports and helpers that an answer may leave out.
  extra_info: { prefix: 'prompt ~ "    pass\\n"', reference: 'prompt ~ canonical_solution' },
  rules+: [lib.own_solution],
};

// The order of the choices is drawn by the seed. The data set asks for an agreement on the hub.
local gpqa(name, subset) = lib.test {
  data_source: name,
  ability: 'stem',
  source: lib.hub('Idavidrein/gpqa', subset=subset, train=null, test='train'),
  expand: 'treetune_data.expansions:shuffled_choices',
  prompt: '{{ Question | trim }}\n{{ choices }}',
  instruction: lib.choice,
  ground_truth: '{{ letter }}',
};

// The questions of June and July 2024. The grader `livebench` goes by `task`.
local livebench(category) = lib.test {
  data_source: 'ood__livebench_' + category,
  ability: 'ood',
  source: lib.hub('livebench/' + category, train=null, test='test'),
  filters: [
    { name: 'other months', where: '(livebench_release_date | string)[:7] in ("2024-06", "2024-07")' },
    { name: 'no answer', where: 'ground_truth is not none' },
  ],
  prompt: '{{ turns[0] }}',
  ground_truth: '{{ ground_truth }}',
  extra_info: { category: 'category', task: 'task' },
};

{
  // HumanEval: 164 functions to complete.
  codegen__humaneval: humaneval('codegen__humaneval', 'openai/openai_humaneval'),

  // HumanEval+: the same functions, with eighty times the tests.
  codegen__humanevalplus: humaneval('codegen__humanevalplus', 'evalplus/humanevalplus'),

  // LeetCode, with an imports' prefix and a check for each problem. The published solution has to pass it.
  codegen__leetcode2k: lib.code {
    data_source: 'codegen__leetcode2k',
    source: lib.hub('newfacade/LeetCodeDataset', revision='34803eb64eab1979069ba1f80e7ea474282e28f3', test='test'),
    splits: ['train', 'test'],
    prompt: '{{ query | sub("### Answer: [(]use the provided format with backticks[)]", "") | trim }}',
    ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ (entry_point | trim) ~ ")"} | json }}',
    extra_info: { prefix: 'prompt', reference: 'completion', title: 'meta.question_title', difficulty: 'meta.difficulty' },
    rules+: [lib.own_solution],
  },

  // LiveCodeBench as DeepCoder has it: 599 problems to train on, 279 to measure on. It has no solutions.
  codegen__livecodebench: lib.code {
    data_source: 'codegen__livecodebench',
    source: lib.hub('agentica-org/DeepCoder-Preview-Dataset', subset='lcbv5', test='test'),
    splits: ['train', 'test'],
    expand: 'treetune_data.expansions:code_tests',
    prompt: lib.program,
    ground_truth: '{{ oracle | json }}',
    extra_info: { function_name: 'function_name' },
    // Its test split is one of the sets that rows are held against.
    rules: [lib.length, { type: 'exact_duplicates', loose: true }, { type: 'near_duplicates', similarity: 0.9 }],
  },

  // MBPP: 500 small functions of its test split, three tests each, which the prompt shows.
  codegen__mbpp: lib.test {
    data_source: 'codegen__mbpp',
    ability: 'codegen',
    source: lib.hub('google-research-datasets/mbpp', subset='full', train=null, test='test'),
    prompt: '{{ text }}\n\nYour code should pass these tests:\n\n{{ test_list | join("\\n") }}',
    instruction: lib.python,
    ground_truth: '{{ {"functional": test_list} | json }}',
    extra_info: { prefix: 'test_setup_code', reference: 'code' },
    rules+: [lib.own_solution],
  },

  // MBPP+: 378 of these functions, with thirty-five times the tests.
  codegen__mbppplus: lib.test {
    data_source: 'codegen__mbppplus',
    ability: 'codegen',
    source: lib.hub('evalplus/mbppplus', train=null, test='test'),
    prompt: '{{ prompt }}\n\nYour code should pass these tests:\n\n{{ test_list | join("\\n") }}',
    instruction: lib.python,
    ground_truth: '{{ {"functional": test} | json }}',
    extra_info: { reference: 'code' },
    rules+: [lib.own_solution],
  },

  // PrimeIntellect's problems as DeepCoder has them. Those with pictures or without a description go, and those whose own solution fails.
  codegen__primeintellect: lib.code {
    data_source: 'codegen__primeintellect',
    source: lib.hub('agentica-org/DeepCoder-Preview-Dataset', subset='primeintellect'),
    expand: 'treetune_data.expansions:code_tests',
    filters: [
      { name: 'pictures', where: '"![" not in problem and "<image" not in problem' },
      { name: 'no description', where: '(problem | alphanumerics) >= 100' },
    ],
    prompt: lib.program,
    ground_truth: '{{ oracle | json }}',
    extra_info: { function_name: 'function_name', references: 'solutions' },
    rules+: [lib.own_solution { reference: 'extra_info.references' }],
  },

  // TACO, verified. Problems of GeeksforGeeks and LeetCode go, those of fewer than 100 letters and digits, and those with pictures;
  // and those whose own solutions fail.
  codegen__taco: lib.code {
    data_source: 'codegen__taco',
    source: lib.hub('likaixin/TACO-verified'),
    expand: 'treetune_data.expansions:code_tests',
    filters: [
      { name: 'GeeksforGeeks and LeetCode', where: 'source not in ("geeksforgeeks", "leetcode")' },
      { name: 'too short', where: '(question | alphanumerics) >= 100' },
      { name: 'pictures', where: '"image" not in (question | lower) and "\\n![" not in question' },
    ],
    prompt: lib.program_of('question'),
    ground_truth: '{{ oracle | json }}',
    extra_info: { function_name: 'function_name', references: 'solutions', dataset: 'source', difficulty: 'difficulty' },
    rules+: [lib.own_solution { reference: 'extra_info.references' }],
  },

  // ARC-AGI-1 (fchollet/ARC-AGI on GitHub) as Guru has it: 111 tasks, at most six demonstrations each.
  logic__arcagi1: lib.from_guru('logic__arcagi1_111.parquet', 'offline_eval/simulation__arcagi1_200.parquet') {
    data_source: 'logic__arcagi1',
    ability: 'logical_reasoning',
  },

  // ARC-AGI-2 (arcprize/ARC-AGI-2 on GitHub) as Guru has it: 190 tasks.
  logic__arcagi2: lib.from_guru('logic__arcagi2_190.parquet') {
    data_source: 'logic__arcagi2',
    ability: 'logical_reasoning',
  },

  // BARC (barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems) as Guru has it: 1.6 thousand tasks.
  logic__barc: lib.from_guru('logic__barc_1.6k.parquet') {
    data_source: 'logic__barc',
    ability: 'logical_reasoning',
  },

  // Guru's own graph puzzles: the next trait on a path; 1.2 thousand. They were generated, and stand nowhere else.
  logic__graph_logical: lib.from_guru('logic__graph_logical*.parquet') {
    data_source: 'logic__graph_logical',
    ability: 'logical_reasoning',
  },

  // Guru's own ordering puzzles; 1.9 thousand. The task ordering_puzzles makes others, as many as you like.
  logic__ordering_puzzle: lib.from_guru('logic__ordering_puzzle*.parquet', 'online_eval/logic__ordering_puzzle*_100.parquet') {
    data_source: 'logic__ordering_puzzle',
    ability: 'logical_reasoning',
  },

  // Guru's own zebra puzzles; 1.3 thousand.
  logic__zebra_puzzle: lib.from_guru('logic__zebra_puzzle*.parquet', 'online_eval/logic__zebra_puzzle*_200.parquet') {
    data_source: 'logic__zebra_puzzle',
    ability: 'logical_reasoning',
  },

  // AIME 2024: 30 problems. Measured with 32 answers to each, in Guru's table.
  math__aime24: math_test('math__aime24', lib.hub('HuggingFaceH4/aime_2024', train=null, test='train')),

  // AIME 2025: 30 problems.
  math__aime25: math_test('math__aime25', lib.hub('math-ai/aime25', train=null, test='test')),

  // AMC 12 of 2022 and 2023: 83 problems. Answers are numbers such as 142.0.
  math__amc: math_test('math__amc', lib.hub('AI-MO/aimo-validation-amc', train=null, test='train')) {
    ground_truth: '{{ answer | int if answer == answer | int else answer }}',
  },

  // Big-Math, verified. Its answers' pass rates by an 8B model stay beside the rows. The data set asks for an agreement on the hub.
  math__bigmath: lib.math {
    data_source: 'math__bigmath',
    source: lib.hub('SynthLabsAI/Big-Math-RL-Verified'),
    prompt: '{{ problem }}',
    ground_truth: '{{ answer }}',
    extra_info: { dataset: 'source', solve_rate_8b: 'llama8b_solve_rate' },
  },

  // Guru's mathematics: DAPO and Skywork-OR1, duplicates out, answers of at most 100 characters, filtered by difficulty: 54,404
  // rows, which have this schema already.
  math__combined: {
    type: 'prepare_data',
    data_source: 'math__combined',
    ability: 'math',
    copy: true,
    source: lib.guru('math__combined_54.4k.parquet'),
    rules: [lib.length, { type: 'contamination', against: lib.math_test_sets, ngram: 13 }],
  },

  // DAPO-Math-17k: 17,917 problems, each of which its files hold a hundred times. The problem stands within an instruction
  // of its own, which goes.
  math__dapo: lib.math {
    data_source: 'math__dapo',
    source: lib.hub('BytedTsinghua-SIA/DAPO-Math-17k'),
    prompt: '{{ prompt[0].content | found("(?s)answer to the problem[.]\\n\\n(.*)\\n\\nRemember to put your answer") }}',
    ground_truth: '{{ reward_model.ground_truth }}',
    extra_info: { id: 'extra_info.index' },
  },

  // DeepScaleR's 40 thousand problems of AIME, AMC, Omni-MATH and STILL.
  math__deepscaler: lib.math {
    data_source: 'math__deepscaler',
    source: lib.hub('agentica-org/DeepScaleR-Preview-Dataset'),
    prompt: '{{ problem }}',
    ground_truth: '{{ answer }}',
  },

  // MATH-500: 500 problems of MATH's test split.
  math__math500: math_test('math__math500', lib.hub('HuggingFaceH4/MATH-500', train=null, test='test')),

  // Minerva Math: 272 problems of university courses.
  math__minerva: math_test('math__minerva', lib.hub('math-ai/minervamath', train=null, test='test')) { prompt: '{{ question }}' },

  // OlympiadBench: 674 open problems in English without pictures.
  math__olympiadbench: math_test('math__olympiadbench', lib.hub('Hothan/OlympiadBench', subset='OE_TO_maths_en_COMP', train=null, test='train')) {
    prompt: '{{ question }}',
    ground_truth: '{{ final_answer[0] }}',
  },

  // Skywork-OR1's 105,055 problems. The answer is a JSON list, whose first item counts.
  math__or1: lib.math {
    data_source: 'math__or1',
    source: lib.hub('Skywork/Skywork-OR1-RL-Data', train='math'),
    prompt: '{{ prompt[0].content }}',
    ground_truth: '{{ (reward_model.ground_truth | from_json)[0] }}',
  },

  // Open-Reasoner-Zero's 57 thousand. Its file is a list of pairs of turns; how the hub's reader calls the two is not known for
  // sure: look at a row where `expand` complains.
  math__orz: lib.math {
    data_source: 'math__orz',
    source: lib.hub('Open-Reasoner-Zero/orz_math_57k_collection'),
    expand: 'treetune_data.expansions:orz_turns',
    prompt: '{{ question }}',
    ground_truth: '{{ answer }}',
  },

  // IFbench: instructions that IFEval doesn't have; the grader knows IFEval's alone, and tells those that it can't check.
  ood__ifbench: lib.test {
    data_source: 'ood__ifbench',
    ability: 'ood',
    source: lib.hub('allenai/IFBench_test', train=null, test='train'),
    prompt: '{{ prompt }}',
    ground_truth: '{{ {"instruction_id_list": instruction_id_list, "kwargs": kwargs} | json }}',
    extra_info: { key: 'key' },
  },

  // IFeval: 541 prompts with instructions that a program can check.
  ood__ifeval: lib.test {
    data_source: 'ood__ifeval',
    ability: 'ood',
    source: lib.hub('google/IFEval', train=null, test='train'),
    prompt: '{{ prompt }}',
    ground_truth: '{{ {"instruction_id_list": instruction_id_list, "kwargs": kwargs} | json }}',
    extra_info: { key: 'key' },
  },

  // LiveBench, data_analysis: the questions of June and July 2024. The grader `livebench` goes by `task`.
  ood__livebench_data_analysis: livebench('data_analysis'),

  // LiveBench, language: the questions of June and July 2024. The grader `livebench` goes by `task`.
  ood__livebench_language: livebench('language'),

  // LiveBench, reasoning: the questions of June and July 2024. The grader `livebench` goes by `task`.
  ood__livebench_reasoning: livebench('reasoning'),

  // CodeI/O: programs of PyEdu with a description; one pair of input and output each, of which one is given and the other is to be
  // predicted, either way as often. Its first 200 thousand programs, of which a tenth trains.
  simulation__codeio: {
    type: 'prepare_data',
    data_source: 'simulation__codeio',
    ability: 'simulation',
    source: lib.hub('hkust-nlp/CodeIO-PyEdu-Reasoning-Raw', files={ train: '0_368500_filtered_v2_ds25.sced.jsonl' }),
    expand: 'treetune_data.expansions:codeio_pair',
    prompt: |||
      {{ problem_description }}

      {{ io_requirements }}

      {% if direction == "output" %}Given the following input:

      {{ given | json }}

      Can you predict the output without writing any code?{% else %}Given the following output:

      {{ given | json }}

      Can you predict a feasible input without writing any code?{% endif %} Reason, then put the {{ direction }} as JSON into a block ```json ... ```, as {"{{ direction }}": ...}.

      This code may guide you:

      {{ refcode }}
    |||,
    ground_truth: '{{ wanted | json }}',
    extra_info: { direction: 'direction', refcode: 'refcode', dataset: 'source | default("pyedu")' },
    bad_rows: 'drop',
    rules: [lib.length, { type: 'exact_duplicates' }, { type: 'near_duplicates', similarity: 0.9 }],
    hold_out: { test: 200 },
    sample: { train: 20000 },
  },

  // CRUXEval-I: an input for which a function gives an output; 800 of them.
  simulation__cruxeval_i: lib.test {
    data_source: 'simulation__cruxeval_i',
    ability: 'simulation',
    source: lib.hub('cruxeval-org/cruxeval', train=null, test='test'),
    prompt: |||
      For which arguments does this function return the output below?

      ```python
      {{ code }}
      ```

      assert f(??) == {{ output }}

      Reason step by step, then put arguments that may stand for ?? into a block ```python ... ```.
    |||,
    ground_truth: '{{ {"code": code, "output": output} | json }}',
    extra_info: { id: 'id', reference: 'input' },
  },

  // CRUXEval-O: what a function gives for an input; 800 of them.
  simulation__cruxeval_o: lib.test {
    data_source: 'simulation__cruxeval_o',
    ability: 'simulation',
    source: lib.hub('cruxeval-org/cruxeval', train=null, test='test'),
    prompt: |||
      What does this function return for the input below?

      ```python
      {{ code }}
      ```

      assert f({{ input }}) == ??

      Reason step by step, then put the value that stands for ?? into a block ```python ... ```.
    |||,
    ground_truth: '{{ {"code": code, "input": input} | json }}',
    extra_info: { id: 'id', reference: 'output' },
  },

  // BIG-Bench Extra Hard. That the hub has it under this name, with input, target and task, is from memory.
  stem__bbeh: lib.test {
    data_source: 'stem__bbeh',
    ability: 'stem',
    source: lib.hub('BBEH/bbeh', train=null, test='train'),
    prompt: '{{ input }}',
    instruction: lib.boxed,
    ground_truth: '{{ target }}',
    extra_info: { task: 'task' },
    bad_rows: 'drop',
  },

  // GPQA: 448 questions. The data set asks for an agreement on the hub. The order of the choices is drawn by the seed.
  stem__gpqa: gpqa('stem__gpqa', 'gpqa_main'),

  // GPQA Diamond: 198 questions. The data set asks for an agreement on the hub. The order of the choices is drawn by the seed.
  stem__gpqa_diamond: gpqa('stem__gpqa_diamond', 'gpqa_diamond'),

  // SuperGPQA: choices of up to ten; 200 of its 26,529 questions, drawn by the seed, as Guru measures.
  stem__supergpqa: lib.test {
    data_source: 'stem__supergpqa',
    ability: 'stem',
    source: lib.hub('m-a-p/SuperGPQA', train=null, test='train'),
    prompt: '{{ question | trim }}\n{% for option in options %}{{ "ABCDEFGHIJ"[loop.index0] }}) {{ option }}\n{% endfor %}',
    instruction: lib.choice,
    ground_truth: '{{ answer_letter }}',
    extra_info: { field: 'field', difficulty: 'difficulty' },
    sample: { test: 200 },
  },

  // WebInstruct-verified: science but no mathematics, of universities and beyond, whose answer is neither a choice nor yes or no, has at
  // most 30 tokens and no more than three decimals.
  stem__web: {
    type: 'prepare_data',
    data_source: 'stem__web',
    ability: 'stem',
    source: lib.hub('TIGER-Lab/WebInstruct-verified'),
    filters: [
      { name: 'mathematics', where: 'category != "Mathematics"' },
      { name: 'below university', where: 'difficulty in ("University", "PhD")' },
      { name: 'choices and yes or no', where: 'answer_type not in ("Boolean", "Multiple Choice")' },
      { name: 'no answer', where: '(answer | trim | length) > 0' },
      { name: 'many decimals', where: 'answer is not matching("[0-9][.][0-9]{4,}")' },
    ],
    prompt: '{{ question | trim }}',
    instruction: lib.boxed,
    ground_truth: '{{ answer }}',
    extra_info: { category: 'category', difficulty: 'difficulty', answer_type: 'answer_type' },
    bad_rows: 'drop',
    rules: [
      lib.length { max_ground_truth_tokens: 30 },
      { type: 'exact_duplicates', loose: true },
      { type: 'near_duplicates', similarity: 0.9 },
      { type: 'contamination', against: lib.stem_test_sets, ngram: 13 },
    ],
  },

  // FinQA's test split: questions about a table of a company's report and the text around it. That this copy on the hub has the
  // fields pre_text, table, post_text, question and answer is from memory: look at a row before you trust a number.
  table__finqa: lib.test {
    data_source: 'table__finqa',
    ability: 'table',
    source: lib.hub('dreamerdeo/finqa', train=null, test='test'),
    prompt: |||
      {{ pre_text | join(" ") }}

      {% for row in table %}| {{ row | join(" | ") }} |
      {% endfor %}
      {{ post_text | join(" ") }}

      The question is:
      {{ question }}
    |||,
    instruction: lib.boxed,
    ground_truth: '{{ answer }}',
    bad_rows: 'drop',
  },

  // HiTab (microsoft/HiTab on GitHub) as Guru has it: 4.3 thousand questions about tables with levels of headings.
  table__hitab: lib.from_guru('table__hitab_4.3k.parquet', 'online_eval/table__hitab*_200.parquet') {
    data_source: 'table__hitab',
    ability: 'table',
  },

  // MultiHiertt (psunlpgroup/MultiHiertt on GitHub) as Guru has it: 1.5 thousand arithmetic questions that need no text.
  table__multihier: lib.from_guru('table__multihier_1.5k.parquet', 'online_eval/table__multihier*_200.parquet') {
    data_source: 'table__multihier',
    ability: 'table',
  },
}
