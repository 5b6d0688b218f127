// The tags of threads as one token each, on the right of a model that hasn't learned them; a checkpoint of
// a run with them has them already and stays as it is. ThreadWeaver's order.
{
  model+: {
    added_tokens: [
      '<Think>',
      '</Think>',
      '<Parallel>',
      '</Parallel>',
      '<Outlines>',
      '</Outlines>',
      '<Outline>',
      '</Outline>',
      '<Thread>',
      '</Thread>',
      '<Conclusion>',
      '</Conclusion>',
    ],
  },
}
