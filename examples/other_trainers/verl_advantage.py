"""verl with a credit of treetune as its advantage estimator, such as VinePPO's.

    pip install verl    # into the environment that has treetune

    from verl_advantage import use_credit
    use_credit({"type": "monte_carlo", "samples": 9}, engine=sample, grader=reward, tokenizer=tokenizer,
               sampling=SamplingParams(max_tokens=1024))

Call it in the trainer's process before training, and set algorithm.adv_estimator=treetune. `engine` samples
with the present policy, such as a function that asks verl's rollout servers.

verl gives an estimator rewards, masks and groups (uid), but no token ids. So the Ray trainer's
`compute_advantage` is wrapped to keep its batch. verl's trainer v1 puts no token ids into that batch; there,
only credits that read rewards alone work (group, rloo, outcome).
"""

from contextvars import ContextVar

from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.core_algos import register_adv_est

from treetune import GroupCredit
from treetune.credit import CreditAssigner, GradedAnswer

_batch = ContextVar("batch")
_compute_advantage = ray_trainer.compute_advantage
_state = {"assigner": None, "step": 0}


def use_credit(credit, **settings):
    """Assigns this credit from now on; `settings` are those of `CreditAssigner`."""
    _state["assigner"] = CreditAssigner(credit, **settings)
    ray_trainer.compute_advantage = compute_advantage_with_batch


def compute_advantage_with_batch(data, *args, **settings):
    token = _batch.set(data.batch)
    try:
        return _compute_advantage(data, *args, **settings)
    finally:
        _batch.reset(token)


@register_adv_est("treetune")
def estimate(token_level_rewards, response_mask, index, **_):
    assigner, batch = _state["assigner"], _batch.get({})
    has_ids = "responses" in list(batch.keys())  # a TensorDict refuses `in`
    if not has_ids and not isinstance(assigner.credit, GroupCredit):
        raise ValueError(
            "this trainer of verl passes no token ids: choose 'group' or 'rloo', or use_v1=False"
        )
    answers = []
    for row, mask in enumerate(response_mask.bool()):
        length = int(mask.nonzero().max()) + 1  # padding follows the last sampled token
        prompt_ids, ids = [0], response_mask[row].long()
        if has_ids:
            prompts = batch["prompts"][row]
            prompt_ids, ids = (
                prompts[batch["attention_mask"][row, : len(prompts)].bool()],
                batch["responses"][row],
            )
        reward = float(token_level_rewards[row].sum())
        answers.append(GradedAnswer(prompt_ids, ids[:length], reward, str(index[row]), sampled=mask[:length]))
    credited = assigner.advantages(answers, iteration=_state["step"])
    _state["step"] += 1
    advantages = credited.padded(response_mask.shape[1]) * response_mask
    return advantages, advantages
