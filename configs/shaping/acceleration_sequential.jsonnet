// Up to 0.1 for what a correct answer's critical path saves of the task's sequential solution to the same problem. A
// thread that adds nothing saves nothing. Slower than sequential is worth no less than as slow (floor: 0).
{ shaping+: [{
  type: 'acceleration',
  form: 'saved',
  reference: { type: 'sequential_demonstration' },
  weight: 0.5,
  clip: 0.2,
  floor: 0,
}] }
