// Guru's own graph puzzles: the next trait on a path; 1.2 thousand. They were generated, and stand nowhere else.
local lib = import 'lib.libsonnet';

lib.from_guru('logic__graph_logical*.parquet') {
  data_source: 'logic__graph_logical',
  ability: 'logical_reasoning',
}
