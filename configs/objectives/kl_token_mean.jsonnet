// The KL as a mean over tokens, as the policy term: its weight doesn't grow with the length of answers.
// A coefficient that was chosen for the sum over an answer is smaller here by that length.
{ trainer+: { objective+: { kl_reduction: 'token_mean' } } }
