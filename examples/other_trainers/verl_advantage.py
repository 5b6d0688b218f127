"""An advantage estimator for verl that is a credit of treetune, such as VinePPO's.

    pip install verl    # into the environment that has treetune

    from verl_advantage import use_credit
    use_credit({"type": "monte_carlo", "samples": 9}, engine=sample, grader=reward, tokenizer=tokenizer,
               sampling=SamplingParams(max_tokens=1024))

Call `use_credit` in the trainer's process before training, and set algorithm.adv_estimator=treetune. `engine`
samples with the present policy, for example a function that asks verl's rollout servers.

verl gives an estimator rewards, masks and groups (uid), but no token ids. The batch of the Ray trainer has
them, so this file wraps its `compute_advantage` to keep the batch. In verl's trainer v1 the batch has no
token ids; there, only credits that need nothing but rewards work (group, rloo, outcome).
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
    """Makes `credit` the credit of the estimator `treetune`. `settings` are those of `CreditAssigner`."""
    _state["assigner"] = CreditAssigner(credit, **settings)
    ray_trainer.compute_advantage = compute_advantage_with_batch


def compute_advantage_with_batch(data, *args, **settings):
    """Calls verl's `compute_advantage`, and lets `estimate` read the batch meanwhile."""
    token = _batch.set(data.batch)
    try:
        return _compute_advantage(data, *args, **settings)
    finally:
        _batch.reset(token)


@register_adv_est("treetune")
def estimate(token_level_rewards, response_mask, index, **_):
    """Returns advantages and returns, [B, T] each. verl's estimators all have this signature.

    Args:
        token_level_rewards: The rewards, [B, T]; their sum over T is an answer's reward.
        response_mask: 1 at sampled tokens, 0 at padding and at tokens of tools, [B, T].
        index: The group of each answer.
    """
    assigner = _state["assigner"]
    batch = _batch.get({})
    has_ids = "responses" in list(batch.keys())  # a TensorDict doesn't support `in`
    if not has_ids and not isinstance(assigner.credit, GroupCredit):
        raise ValueError(
            "this trainer of verl passes no token ids: choose 'group' or 'rloo', or use_v1=False"
        )
    answers = []
    for row, is_sampled in enumerate(response_mask.bool()):
        if has_ids:
            padded_prompt = batch["prompts"][row]
            is_prompt = batch["attention_mask"][row, : len(padded_prompt)].bool()
            prompt_ids = padded_prompt[is_prompt]
            response_ids = batch["responses"][row]
        else:
            # The credit doesn't read token ids: any ones of the right number will do.
            prompt_ids = [0]
            response_ids = response_mask[row].long()
        length = int(is_sampled.nonzero().max()) + 1  # padding follows the last sampled token
        reward = float(token_level_rewards[row].sum())
        answers.append(
            GradedAnswer(
                prompt_ids, response_ids[:length], reward, str(index[row]), sampled=is_sampled[:length]
            )
        )
    credited = assigner.advantages(answers, iteration=_state["step"])
    _state["step"] += 1
    advantages = credited.padded(response_mask.shape[1]) * response_mask
    return advantages, advantages  # the second are the returns, which only a critic uses
