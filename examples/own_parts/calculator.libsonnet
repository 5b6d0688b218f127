// A chat with tools for a tiny model.
{
  // A chat template with roles and tools, as large models have it.
  chat: {
    template: std.join('', [
      '{% for tool in tools or [] %}<tools>{{ tool.function.name }}{% endfor %}',
      '{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}',
      '{% if add_generation_prompt %}<assistant>{% endif %}',
    ]),
  },
  // Tokens for the pieces of which a call consists. Vocabularies of large models have such pieces of JSON, too.
  added_tokens: [
    '<tools>', '<user>', '<assistant>', '<tool>', '<tool_call>', '</tool_call>', 'calculate', 'expression',
    '{"name":"', '","arguments":{"', '":"', '"}}',
  ],
  // The rollout in which the model calls the tool: for training by GRPO and VinePPO, and for the evaluation of SFT.
  turns: {
    type: 'multi_turn',
    environment: {
      type: 'tools',
      format: 'hermes',
      tools: [{ type: 'function', path: 'calculator.calculate' }],
    },
    max_turns: 4,
    max_tokens: 100,
    turn_tokens: 30,
  },
}
