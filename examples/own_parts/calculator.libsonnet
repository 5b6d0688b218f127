// A chat with tools for a tiny model, as the templates of large ones have it: roles, tools, what they answered. What a
// call is written with are tokens, as they are in vocabularies that have seen much JSON.
{
  chat: {
    template: std.join('', [
      '{% for tool in tools or [] %}<tools>{{ tool.function.name }}{% endfor %}',
      '{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}',
      '{% if add_generation_prompt %}<assistant>{% endif %}',
    ]),
  },
  added_tokens: [
    '<tools>', '<user>', '<assistant>', '<tool>', '<tool_call>', '</tool_call>', 'calculate', 'expression',
    '{"name":"', '","arguments":{"', '":"', '"}}',
  ],
  // The rollout that calls the tool, in training and where SFT is measured.
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
