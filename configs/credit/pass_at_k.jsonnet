// What an answer adds to the best of four answers, normalised in the group (pass@k training).
{ credit: { type: 'pass_at_k', k: 4 } }
