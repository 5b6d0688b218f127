// The quickstart with a credit of your own for tokens.
local quickstart = import 'lib/quickstart.libsonnet';
quickstart.policy_gradient('own_fading', { imports: ['my_package.fading'], credit: { type: 'fading', decay: 0.95 } })
