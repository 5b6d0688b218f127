// LiveBench, language: the questions of June and July 2024. The grader `livebench` goes by `task`.
local lib = import 'lib.libsonnet';

lib.livebench('language')
