"""The teacher of an objective that compares whole distributions: its pass over a micro-batch, and the moving
average of the policy's weights.

For each micro-batch::

    privileged prompts + answers ──teacher's backbone, no gradient──► hidden states [N, D]
                                                                        │ a chunk of positions at a time
    prompts + answers ──policy's backbone──► hidden states [N, D] ──────┤
                                                                        ▼
                                            both heads ──► logits [C, V] each ──compare──► [C]

The teacher has the same trained tokens in the same order as the policy, so both have N positions. C is the
number of positions in a chunk, V the size of the vocabulary, and D the dimension of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treetune.logits import logits_of
from treetune.models.logprobs import PolicyModule, TeacherStates
from treetune.trainer.batches import MicroBatch
from treetune.trainer.deepspeed_model import DeepSpeedModel, Reference

AVERAGES_FILE = "teacher.safetensors"
"""The file in the folder of a trainer's state that has the moving average of the policy's weights."""


class TeacherModel:
    """Runs the teacher without gradient.

    Args:
        model: Lends the teacher's model for the time of a pass: the reference, the policy, or the moving
            average.
    """

    def __init__(self, model: Reference) -> None:
        self._model = model

    def states(
        self, batch: MicroBatch, compare: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> TeacherStates:
        """Runs the teacher's backbone over a micro-batch, and returns what the policy's pass needs of it.

        Args:
            compare: `TeacherObjective.compare`, which the policy's pass calls with the logits of both models.
        """
        assert batch.teacher_inputs is not None, "the trainer makes them for an objective with a teacher"
        # With LoRA, the reference is the policy's own module, whose adapters are off only in this block. The
        # head, which the policy's pass calls after the block, never has adapters.
        with torch.no_grad(), self._model() as model:
            # The model returns a tuple, here of a single tensor. The temperature has no effect on it: the
            # policy's pass divides the logits of both models by the temperature.
            (hidden_ND,) = model(batch.teacher_inputs, temperature=1.0, hidden_only=True)
        module = model.module if isinstance(model, DeepSpeedModel) else model
        assert isinstance(module, PolicyModule)

        def logits(hidden_CD: Tensor) -> Tensor:
            return logits_of(module.model, hidden_CD)

        return TeacherStates(hidden_ND, logits, compare)


class MovingAverage:
    """The exponential moving average of the policy's weights: average ← d·average + (1 − d)·policy after each
    optimizer step.

    It is kept in float32. In bfloat16, which has 8 significant bits, a change by (1 − d) times a small step
    would be rounded to nothing.

    Args:
        module: A model like the policy's, on the same device, with the start weights. Its weights become the
            average.
        decay: d.
    """

    def __init__(self, module: PolicyModule, decay: float) -> None:
        self.module, self.decay = module, decay
        self._in_float32: dict[str, Tensor] = {}
        """The averages of those parameters of `module` that have a lower precision. A parameter in float32
        holds its average itself."""
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32:
                self._in_float32[name] = parameter.detach().float()

    @torch.no_grad()
    def follow(self, policy: nn.Module) -> None:
        """Moves the average towards the policy's weights. Weights that aren't trained stay the same: with
        LoRA, these are all weights except the adapters."""
        parameters = dict(self.module.named_parameters())
        for name, weight in policy.named_parameters():
            if not weight.requires_grad:
                continue
            parameter = parameters[name]
            average: Tensor = self._in_float32.get(name, parameter)
            average.lerp_(weight.float(), 1 - self.decay)
            if average is not parameter:  # the parameter has a lower precision than its average
                parameter.copy_(average)

    def move_to(self, device: torch.device) -> None:
        """Moves the average to a device."""
        self.module.to(device)
        self._in_float32 = {name: average.to(device) for name, average in self._in_float32.items()}

    def save(self, directory: Path) -> None:
        """Writes the average. All ranks have the same average, so only one of them needs to call this."""
        averages = {}
        for name, parameter in self.module.named_parameters():
            averages[name] = self._in_float32.get(name, parameter).detach().cpu().contiguous()
        save_file(averages, directory / AVERAGES_FILE)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, on every rank.

        Raises:
            RuntimeError: The stored state has no moving average, or that of another model.
        """
        file = directory / AVERAGES_FILE
        if not file.is_file():
            raise RuntimeError(
                f"{directory} was written without a moving average of the weights"
                " (trainer.objective.teacher.weights 'average'), which is therefore unknown: train from the"
                " beginning, in another directory"
            )
        averages = load_file(file)
        parameters = dict(self.module.named_parameters())
        if averages.keys() != parameters.keys():
            raise RuntimeError(
                f"{file} has the weights of another model: train from the beginning, in another directory"
            )
        for name, parameter in parameters.items():
            parameter.copy_(averages[name])
            if name in self._in_float32:
                self._in_float32[name].copy_(averages[name])
