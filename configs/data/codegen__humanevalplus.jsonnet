// HumanEval+: the same functions, with eighty times the tests.
local lib = import 'lib.libsonnet';

lib.humaneval('codegen__humanevalplus', 'evalplus/humanevalplus')
