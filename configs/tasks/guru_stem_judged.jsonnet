// Append it to an experiment with the domain stem: a model judges the answers that the rule rejects, as published by
// TIGER-Lab/general-verifier (1.5B), which decides between yes and no. Serve it, `vllm serve TIGER-Lab/general-verifier`,
// and name its address: APP_JUDGE_URL=http://127.0.0.1:8000/v1.
local judge = {
  type: 'judge',
  rule: { type: 'math' },
  when: 'rule_rejects',
  endpoint: { base_url: std.extVar('APP_JUDGE_URL'), model: 'TIGER-Lab/general-verifier', temperature: 0.0 },
  prompt: |||
    ### Question: {problem}

    ### Ground Truth Answer: {gold}

    ### Student Answer: {response}

    Does the student's answer say the same as the ground truth answer? Do not solve the question. End with "Final Decision: Yes" or "Final Decision: No".
  |||,
  verdict_pattern: 'final decision\\W{0,10}(yes|no)\\b',
  scores: { yes: 1.0, no: 0.0 },
  deadline: 60.0,
};
local judged(task) =
  if task.type == 'mixture' then { domains+: { stem+: { task+: judged(task.domains.stem.task) } } }
  else if std.objectHas(task.routes, 'stem__web') then { routes+: { stem__web: judge } }
  else {};
{ task+: if 'task' in super then judged(super.task) else {} }  // {}: no experiment is on the left
