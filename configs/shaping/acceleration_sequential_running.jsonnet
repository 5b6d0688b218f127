// Up to 0.1 for what a correct answer's critical path saves of the policy's own sequential answers: the running mean
// per problem over correct answers that opened no block. Problems that were never answered so give nothing
// (acceleration/without_reference).
{ shaping+: [{
  type: 'acceleration',
  form: 'saved',
  reference: { type: 'sequential_running', decay: 0.8 },
  weight: 0.5,
  clip: 0.2,
  floor: 0,
}] }
