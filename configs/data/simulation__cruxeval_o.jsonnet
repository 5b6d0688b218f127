// CRUXEval-O: what a function gives for an input; 800 of them.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'simulation__cruxeval_o',
  ability: 'simulation',
  source: lib.hub('cruxeval-org/cruxeval', train=null, test='test'),
  prompt: |||
    What does this function return for the input below?

    ```python
    {{ code }}
    ```

    assert f({{ input }}) == ??

    Reason step by step, then put the value that stands for ?? into a block ```python ... ```.
  |||,
  ground_truth: '{{ {"code": code, "input": input} | json }}',
  extra_info: { id: 'id', reference: 'output' },
}
