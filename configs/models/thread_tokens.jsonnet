// The tags of threads as one token each, to append to a model that hasn't learned them. A checkpoint of
// a run with them has them already and is not changed. ThreadWeaver's order.
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
