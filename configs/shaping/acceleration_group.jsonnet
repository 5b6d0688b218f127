// Up to 0.1 for what a correct answer's critical path saves of the median one among the other correct answers to the
// problem. A thread that adds nothing saves nothing. Slower than the median is worth no less than the median (floor: 0).
{ shaping+: [{
  type: 'acceleration',
  form: 'saved',
  reference: { type: 'group' },
  weight: 0.5,
  clip: 0.2,
  floor: 0,
}] }
