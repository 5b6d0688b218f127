// FinQA's test split: questions about a table of a company's report and the text around it. That this copy on the hub has the
// fields pre_text, table, post_text, question and answer is from memory: look at a row before you trust a number.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'table__finqa',
  ability: 'table',
  source: lib.hub('dreamerdeo/finqa', train=null, test='test'),
  prompt: |||
    {{ pre_text | join(" ") }}

    {% for row in table %}| {{ row | join(" | ") }} |
    {% endfor %}
    {{ post_text | join(" ") }}

    The question is:
    {{ question }}
  |||,
  instruction: lib.boxed,
  ground_truth: '{{ answer }}',
  bad_rows: 'drop',
}
