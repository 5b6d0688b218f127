// A few answers with what the run's own credit and others give each of their steps, for the report: methods of
// credit_bench.jsonnet that stand for their kinds, and 128 continuations as the truth.
local bench = (import 'credit_bench.jsonnet').analyzers[0].methods;
local shown = ['GRPO', 'siblings', 'VinePPO K=3', 'VinePPO K=9', 'K=3, smoothed', 'bisect K=9', 'sequential from 3'];
{
  analyzers+: [{
    type: 'credit_microscope',
    methods: { [name]: bench[name] for name in shown },
    truth: 128,
  }],
}
