// GSM8K for models that think first: asked in their chat template, graded by value on what stands behind the
// thought. An answer that never comes out of thinking is none.
(import 'gsm8k.jsonnet') + {
  task+: {
    prompt: '{problem}\n\nSolve this step by step. On a new line at the end, give the final numerical answer after ####.',
    stop: [],
    grader: { type: 'numeric', think_end: '</think>', require_think_end: true, without_marker: 'boxed' },
  },
}
