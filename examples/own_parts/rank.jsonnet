// The quickstart with a credit of your own for whole answers.
local quickstart = import 'lib/quickstart.libsonnet';
quickstart.policy_gradient('own_rank', { imports: ['my_package.rank'], credit: { type: 'rank' } })
