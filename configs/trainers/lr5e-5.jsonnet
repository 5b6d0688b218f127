// The rate of supervised fine-tuning, DeepSeekMath-7B.
{ trainer+: { learning_rate: 5e-5 } }
