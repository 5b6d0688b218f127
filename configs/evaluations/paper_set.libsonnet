// How the VinePPO paper samples what it measures.
{ samples: 16, temperature: 0.35, top_p: 0.9, max_tokens: 1024 }
