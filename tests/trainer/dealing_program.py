"""Deals a model of files out over two ranks, as each of several settings says, and writes how much memory
that took: run by a test."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn


def anonymous_bytes() -> int:
    """Of this process, now: what is no file's."""
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
    real = InTurn.parameters

    def watched(self: InTurn, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in real(self, recurse):
            peaks.append(anonymous_bytes())
            yield parameter
            peaks.append(anonymous_bytes())

    def watched_read(parameter: nn.Parameter) -> torch.Tensor:
        peaks.append(anonymous_bytes())
        return read(parameter)

    InTurn.parameters = watched  # type: ignore[method-assign]
    read, shards._read = shards._read, watched_read

    def dealt_out(folder: Path, settings: Trainer) -> DeepSpeedModel:
        model = PretrainedModel(name_or_path=str(folder)).load_in_parts(torch.float32)
        peaks.append(anonymous_bytes())
        return DeepSpeedModel(PolicyModule(model), settings, ranks)

    taken = []
    for cut in json.loads(cuts):
        settings = Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, **cut)
        assert settings.reads_in_parts
        dealt_out(small_folder, settings)  # what is imported for it is no weight
        gc.collect()
        peaks.clear()
        before = anonymous_bytes()
        weights = dealt_out(model_folder, settings).state_dict()
        if ranks.is_first:
            expected = load_file(model_folder / "model.safetensors")
            assert {name.removeprefix("model.") for name in weights} == expected.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name.removeprefix("model.")]), name
        del weights
        taken.append(ranks.exchange("taken", max(peaks) - before))
    if ranks.is_first:
        out.write_text(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
