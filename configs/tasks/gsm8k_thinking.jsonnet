// GSM8K for models that think first: asked in their chat template, and the text after the thought is graded
// by value. A response whose thought doesn't end has no answer.
(import 'gsm8k.jsonnet') + {
  task+: {
    prompt: '{problem}\n\nSolve this step by step. On a new line at the end, give the final numerical answer after ####.',
    stop: [],
    grader: { type: 'numeric', think_end: '</think>', require_think_end: true, without_marker: 'boxed' },
  },
}
