"""TRL's GRPOTrainer with a credit of treetune, such as VinePPO's: an advantage for each token.

    pip install trl    # into the environment that has treetune

    from trl_grpo import CreditGRPOTrainer
    trainer = CreditGRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=rows,
                                credit={"type": "monte_carlo", "samples": 9})

TRL samples and grades the completions. Continuations are sampled with the model that is trained (in float32,
in this process) and graded by the same reward functions, which are Python functions. With several processes,
each process needs whole groups: per_device_train_batch_size * steps_per_generation has to be a multiple of
num_generations.
"""

from trl import GRPOTrainer

from treetune import SamplingParams
from treetune.credit import CreditAssigner, GradedAnswer


class CreditGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, credit, engine=None, **settings):
        super().__init__(*args, **settings)
        sampling = SamplingParams(
            self.args.max_completion_length, self.temperature, self.top_p, top_k=self.top_k or -1
        )
        model = self.accelerator.unwrap_model(self.model)
        # TRL grades completions that were cut off, so continuations are graded as well.
        self._assigner = CreditAssigner(
            credit, engine=engine or model, grader=self._grade, tokenizer=self.processing_class,
            sampling=sampling, unfinished_reward=None, seed=self.args.seed,
        )  # fmt: skip

    def _grade(self, prompt, text, problem):
        row = dict(problem.data)
        prompt = row.pop("prompt")
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        columns = {name: [value] for name, value in row.items()}
        total = 0.0
        for function, weight in zip(self.reward_funcs, self.reward_weights.tolist(), strict=True):
            (reward,) = function(prompts=[prompt], completions=[completion], completion_ids=[[]], **columns)
            total += weight * (reward or 0.0)
        return total

    def _calculate_rewards(self, *args):
        self._rewards = super()._calculate_rewards(*args)  # of all processes, a column for each function
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        rewards = (self._rewards.cpu() * self.reward_weights).nansum(1)[first : first + len(inputs)]
        answers = []
        for number, row in enumerate(inputs):
            is_response = batch["completion_mask"][number].bool()
            sampled = batch["tool_mask"][number][is_response] if "tool_mask" in batch else None
            prompt_ids = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()]
            ids = batch["completion_ids"][number][is_response]
            answers.append(GradedAnswer(prompt_ids, ids, float(rewards[number]), sampled=sampled, data=row))
        credited = self._assigner.advantages(answers, iteration=self.state.global_step)
        batch["advantages"] = credited.padded(batch["completion_ids"].shape[1])  # the loss takes [B, T]
        return batch
