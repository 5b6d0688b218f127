// CRUXEval-I: an input for which a function gives an output; 800 of them.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'simulation__cruxeval_i',
  ability: 'simulation',
  source: lib.hub('cruxeval-org/cruxeval', train=null, test='test'),
  prompt: |||
    For which arguments does this function return the output below?

    ```python
    {{ code }}
    ```

    assert f(??) == {{ output }}

    Reason step by step, then put arguments that may stand for ?? into a block ```python ... ```.
  |||,
  ground_truth: '{{ {"code": code, "output": output} | json }}',
  extra_info: { id: 'id', reference: 'input' },
}
