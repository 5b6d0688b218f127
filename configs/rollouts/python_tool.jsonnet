// Python in the sandbox, up to four times in an answer, for an experiment with a model that chats: what it prints is said
// to the model as the user's next message. The task's grader reads the last turn.
{
  local alone = if 'rollout' in super then super.rollout else {},  // {}: no experiment is on the left
  local kept = ['samples', 'max_tokens', 'temperature', 'top_p', 'top_k', 'max_prompt_tokens', 'unfinished_reward'],
  rollout: {
    type: 'multi_turn',
    environment: { type: 'tools', tools: [{ type: 'python' }], most_calls: 4 },
    max_turns: 6,
    stop: ['</python>'],
  } + { [key]: alone[key] for key in kept if std.objectHas(alone, key) },
  model+: {
    chat+: {
      system: 'You may run Python: write <python>…</python>, end your message there, and what the code prints comes with '
              + 'the next one. Code is forgotten after each run. Give your final answer in a message without code.',
    },
  },
}
