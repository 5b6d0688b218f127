// Solutions become parallel ones with a hosted model's help, with ThreadWeaver's settings: at least 200 characters
// saved per block, 128 requests at a time, little effort for small edits, 1.25 and 10 dollars per million tokens.
// The key is read from the environment variable that is named here. `budget` is for you to raise.
{
  type: 'make_threads',
  endpoint: {
    base_url: 'https://api.openai.com/v1',
    model: 'gpt-5',
    api_key_variable: 'OPENAI_API_KEY',
    max_tokens_key: 'max_completion_tokens',
    max_tokens: 32768,
    concurrency: 128,
  },
  extra_for: { references: { reasoning_effort: 'low' } },
  prices: { input: 1.25, output: 10 },
  budget: 10,
  problem_field: 'problem',
  solution_field: 'solution',
  min_saved_characters: 200,
}
