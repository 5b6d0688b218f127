// How the VinePPO paper samples. Few problems are long: those over 1512 tokens are left out of training,
// and where the context is shorter than prompt and 1024 tokens, an answer may fill what is left of it.
{
  rollout+: {
    type: 'single_turn',
    temperature: 0.6,
    top_p: 0.9,
    max_tokens: 1024,
    stop: ['\n\n\nProblem:'],
    max_prompt_tokens: 1512,
  },
}
