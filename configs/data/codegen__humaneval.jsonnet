// HumanEval: 164 functions to complete.
local lib = import 'lib.libsonnet';

lib.humaneval('codegen__humaneval', 'openai/openai_humaneval')
