// Up to 0.1 for what a correct answer's critical path saves of a sequential experiment's correct answers to the same
// problem: APP_SEQUENTIAL_ANSWERS is the answers.jsonl of its evaluation on the problems that are trained on here.
{ shaping+: [{
  type: 'acceleration',
  form: 'saved',
  reference: { type: 'sequential_measured', answers: std.extVar('APP_SEQUENTIAL_ANSWERS') },
  weight: 0.5,
  clip: 0.2,
  floor: 0,
}] }
