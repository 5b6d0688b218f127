"""TRL's GRPOTrainer with a credit of treetune, such as VinePPO's, which gives each token its advantage.

    pip install trl    # into the environment that has treetune

    from trl_grpo import CreditGRPOTrainer
    trainer = CreditGRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=rows,
                                credit={"type": "monte_carlo", "samples": 9})

TRL samples and grades the completions. treetune samples continuations with the model that is trained, in
float32 and in this process, or from the vLLM server whose address is `engine`. It grades them with the same
reward functions, which must be Python functions. With several processes, each process needs whole groups:
per_device_train_batch_size * steps_per_generation has to be a multiple of num_generations.
"""

from trl import GRPOTrainer

from treetune import SamplingParams
from treetune.credit import CreditAssigner, GradedAnswer


class CreditGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` with the advantages of `credit`, a configuration such as ``{"type": "rloo"}``."""

    def __init__(self, *args, credit, engine=None, **settings):
        super().__init__(*args, **settings)
        self._assigner = CreditAssigner(
            credit,
            engine=engine or self.accelerator.unwrap_model(self.model),
            grader=self._grade,
            tokenizer=self.processing_class,
            sampling=SamplingParams(
                self.args.max_completion_length, self.temperature, self.top_p, top_k=self.top_k or -1
            ),
            unfinished_reward=None,  # cut-off continuations are graded, as TRL grades cut-off completions
            seed=self.args.seed,
        )

    def _grade(self, prompt, text, problem):
        """Returns the reward of a text: the weighted sum of TRL's reward functions."""
        row = dict(problem.data)  # the row of the data set
        prompt = row.pop("prompt")
        is_chat = not isinstance(prompt, str)
        completion = [{"role": "assistant", "content": text}] if is_chat else text
        columns = {name: [value] for name, value in row.items()}
        total = 0.0
        for function, weight in zip(self.reward_funcs, self.reward_weights.tolist(), strict=True):
            (reward,) = function(prompts=[prompt], completions=[completion], completion_ids=[[]], **columns)
            total += weight * (reward or 0.0)
        return total

    def _calculate_rewards(self, *args):
        # Keeps the rewards for the method below: a row per answer of all processes, a column per function.
        self._rewards = super()._calculate_rewards(*args)
        return self._rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        all_rewards = (self._rewards.cpu() * self.reward_weights).nansum(1)
        start = self.accelerator.process_index * len(inputs)
        rewards = all_rewards[start : start + len(inputs)]  # of this process
        answers = []
        for index, row in enumerate(inputs):
            is_prompt = batch["prompt_mask"][index].bool()
            is_response = batch["completion_mask"][index].bool()  # true for all tokens but padding
            prompt_ids = batch["prompt_ids"][index][is_prompt]
            response_ids = batch["completion_ids"][index][is_response]
            # TRL has a tool mask if the answers have tokens that tools wrote.
            sampled = batch["tool_mask"][index][is_response] if "tool_mask" in batch else None
            reward = float(rewards[index])
            answers.append(GradedAnswer(prompt_ids, response_ids, reward, sampled=sampled, data=row))
        credited = self._assigner.advantages(answers, iteration=self.state.global_step)
        # TRL's loss also takes advantages of the shape [B, T], in place of one per answer.
        batch["advantages"] = credited.padded(batch["completion_ids"].shape[1])
        return batch
