"""Loads a model from its files on two ranks with each of several settings, and writes the memory it took.

A test runs this program.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn


def private_bytes() -> int:
    """Returns the bytes of this process now that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main(cuts: str, small_folder: Path, model_folder: Path, out: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from treetune.models import shards
    from treetune.models.logprobs import PolicyModule
    from treetune.models.pretrained import PretrainedModel
    from treetune.models.shards import InTurn
    from treetune.objectives.mle import MaximumLikelihood
    from treetune.trainer.base import Trainer
    from treetune.trainer.deepspeed_model import DeepSpeedModel
    from treetune.trainer.ranks import Ranks

    ranks = Ranks.join(300.0)
    peaks: list[int] = []
    read_parameters = InTurn.parameters

    def record_parameters(self: InTurn, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in read_parameters(self, recurse):
            peaks.append(private_bytes())
            yield parameter
            peaks.append(private_bytes())

    def record_read(parameter: nn.Parameter) -> torch.Tensor:
        peaks.append(private_bytes())
        return read(parameter)

    InTurn.parameters = record_parameters  # type: ignore[method-assign]
    read, shards._read_values = shards._read_values, record_read

    def load_on_ranks(folder: Path, settings: Trainer) -> DeepSpeedModel:
        model = PretrainedModel(name_or_path=str(folder)).load_in_parts(torch.float32)
        peaks.append(private_bytes())
        return DeepSpeedModel(PolicyModule(model), settings, ranks)

    peak_bytes = []
    for cut in json.loads(cuts):
        settings = Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, **cut)
        assert settings.reads_in_parts
        load_on_ranks(small_folder, settings)  # imports everything, so that only weights are counted below
        gc.collect()
        peaks.clear()
        before = private_bytes()
        weights = load_on_ranks(model_folder, settings).state_dict()
        if ranks.is_first:
            expected = load_file(model_folder / "model.safetensors")
            assert {name.removeprefix("model.") for name in weights} == expected.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name.removeprefix("model.")]), name
        del weights
        peak_bytes.append(ranks.exchange("peak bytes", max(peaks) - before))
    if ranks.is_first:
        out.write_text(json.dumps(peak_bytes))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
