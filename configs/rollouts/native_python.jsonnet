// Python that keeps its names, called natively up to four times in an answer, for an experiment with a model of Qwen's or
// another whose chat template has tools. The task's grader reads the last turn.
(import 'python_tool.jsonnet') + {
  rollout+: {
    environment: { type: 'tools', format: 'hermes', tools: [{ type: 'python', state: true }], most_calls: 4 },
    stop: [],  // a call ends with its turn
  },
  model+: { chat+: { system: 'Use Python where it helps. Give your final answer in a message without a call.' } },
}
