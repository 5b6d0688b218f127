// GSM8K with the verdicts of the Exploring Paths code: right is what holds the gold's text anywhere in the first
// line marked by ####, 118 for 18 as well.
{ task+: { grader: { type: 'gsm8k_lenient_substring' } } }
