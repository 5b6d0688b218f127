// The end token belongs to the last step, as in the paper's code, even where another token would have begun a step. (The
// paper's own boundaries, compat/steps_*_reference, do so anyway.)
{ task+: { steps+: { end_token: 'last_step' } } }
