// Further configurations of this folder, each under its name: configs/compat/NAME.jsonnet is the field NAME.
{
  // The end token belongs to the last step, as in the paper's code, even where another token would have begun a step. (The
  // paper's own boundaries, compat/steps_*_reference, do so anyway.)
  end_token_in_last_step: { task+: { steps+: { end_token: 'last_step' } } },

  // Evaluation without top-p: an audit by the authors of a later method found that the published runs' evaluation
  // left it out, though their configuration said 0.9.
  evaluation_top_p_1: { evaluation+: { sets: [set { top_p: 1.0 } for set in super.sets] } },

  // GSM8K with the verdicts of the paper's code: equal text, so that no answer equals a gold with a comma.
  grader_gsm8k_exact: { task+: { grader: { type: 'gsm8k_exact' } } },

  // GSM8K with the verdicts of the Exploring Paths code: right is what holds the gold's text anywhere in the first
  // line marked by ####, 118 for 18 as well.
  grader_gsm8k_lenient: { task+: { grader: { type: 'gsm8k_lenient_substring' } } },

  // MATH with the verdicts of the paper's code, right and wrong.
  grader_minerva: { task+: { grader: { type: 'minerva' } } },

  // What Reasoning360's DAPO scripts ran: the upper bound of the clip is the lower one, so that clip-higher is off.
  guru_clip_not_higher: { trainer+: { objective+: { clip_high: self.clip_low } } },

  // SPO 3.3 as its code runs it: only tokens above one half have a loss, so confident ones are pushed down and
  // nothing is lifted.
  spo_mask_above: { trainer+: { objective+: { mask: 'above' } } },

  // SPO as its code runs it: no stop-gradient on the target, so the likeliest token is pushed down as the
  // sampled one is pulled up, harder the less likely that one is.
  spo_moving_target: { trainer+: { objective+: { detach_target: false } } },

  // GSM8K with the step boundaries of the paper's code, which count blank lines in the middle.
  steps_gsm8k_reference: { task+: { steps: { type: 'gsm8k_reference' } } },

  // MATH with the step boundaries of the paper's code.
  steps_math_reference: { task+: { steps: { type: 'math_reference' } } },

  // The warm-up that the paper's runs really had: a first step at the whole rate, a second at none, then
  // logarithmic. (What was meant is in lib/experiment.libsonnet.)
  warmup_deepspeed: { trainer+: { schedule: { type: 'deepspeed_warmup_decay', ratio: 0.03 } } },
}
