// GPQA Diamond: 198 questions. The data set asks for an agreement on the hub. The order of the choices is drawn by the seed.
local lib = import 'lib.libsonnet';

lib.gpqa('stem__gpqa_diamond', 'gpqa_diamond')
