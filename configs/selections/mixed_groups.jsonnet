// Only problems whose answers differ in score: in the others, none was better than its group.
{ selection: { type: 'mixed_groups' } }
