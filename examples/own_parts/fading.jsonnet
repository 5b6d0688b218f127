// The quickstart with a credit of your own for tokens.
local quickstart = import 'lib/quickstart.libsonnet';
quickstart.policy_gradient('own_fading', {
  imports: ['my_package.fading'],
  credit: { type: 'fading', decay: 0.95 },
  trainer+: { advantage_normalisation: 'none' },  // the quickstart's 'whiten' would shift the advantages
})
