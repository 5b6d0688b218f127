"""What states are truly worth to a policy: many continuations of each, found once and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from annotated_types import Gt

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.rollouts.context import RolloutContext
from treetune.runtime.base import PolicyIteration
from treetune.vocabulary import Problem, TokenIds, joined

if TYPE_CHECKING:
    from treetune.runtime.session import Session

AT_ONCE = 256
"""States that are valued before the next are begun: what an interruption costs at most."""


class Place(NamedTuple):
    """A state: what was asked, and the ids that are there of the answer."""

    problem: Problem
    prompt_ids: TokenIds
    begun_ids: TokenIds


class Known(NamedTuple):
    """What a state is worth, and the variance of that as an estimate of its true value."""

    value: float
    noise: float


class TrueValues(Registrable):
    """How the true values of states are found."""

    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        """What is wrong with it in an experiment."""
        return ()

    def find(
        self, context: RolloutContext, session: Session, point: int, places: Sequence[Place]
    ) -> list[Known]:
        """Of each place, by the weights after `point` iterations, which the engine holds."""
        raise NotImplementedError

    def described(self) -> str:
        """All of its settings that the numbers rest on."""
        raise NotImplementedError


@TrueValues.register("continuations")
@dataclass(frozen=True, kw_only=True)
class ByEngine(TrueValues):
    """The mean of `samples` continuations of each state by the engine, for models of any size. They share no
    seed with those of a method."""

    samples: Annotated[int, Gt(1)] = 512

    def find(
        self, context: RolloutContext, session: Session, point: int, places: Sequence[Place]
    ) -> list[Known]:
        from treetune_lab.analyzers.states import TRUTH, continued_places

        return [mean_and_noise(one.rewards) for one in continued_places(context, places, self.samples, TRUTH)]

    def described(self) -> str:
        return f"continuations {self.samples} {self.samples}"


def mean_and_noise(rewards: Sequence[float]) -> Known:
    """Their mean, and its variance."""
    mean = sum(rewards) / len(rewards)
    squares = sum((one - mean) ** 2 for one in rewards)
    return Known(mean, squares / (len(rewards) - 1) / len(rewards))


def found_once(
    truth: TrueValues,
    context: RolloutContext,
    session: Session,
    point: int,
    places: Sequence[Place],
) -> list[Known]:
    """True values, those that were found before from the experiment's ``truths``.

    They are known by their content: weights, task, sampling, settings, prompt and beginning. So another call
    with the same ones samples nothing, and one that was interrupted goes on.
    """
    asked = [_key(place) for place in places]
    with_name = dict(zip(asked, places, strict=True))
    file = session.directory.path / "truths" / f"{_setting(truth, context, session, point)}.jsonl"
    known = dict(_read(file))
    missing = [key for key in with_name if key not in known]
    file.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(missing), AT_ONCE):
        keys = missing[start : start + AT_ONCE]
        found = truth.find(context, session, point, [with_name[key] for key in keys])
        with file.open("a") as out:  # the line's end comes first: the last line may have been cut short
            out.writelines("\n" + json.dumps([key, *one]) for key, one in zip(keys, found, strict=True))
        known |= zip(keys, found, strict=True)
        context.log.progress(start + len(keys), len(missing))
    return [known[key] for key in asked]


def _read(file: Path) -> Iterator[tuple[str, Known]]:
    """What is in the file; a line that an interruption cut short counts as not written."""
    if not file.is_file():
        return
    for line in file.read_text().splitlines():
        try:
            key, value, noise = json.loads(line)
        except ValueError:
            continue
        yield key, Known(value, noise)


def _key(place: Place) -> str:
    digest = hashlib.blake2b(repr((place.problem.id, place.problem.gold)).encode(), digest_size=12)
    for ids in (place.prompt_ids, place.begun_ids):
        digest.update(len(ids).to_bytes(4, "big") + ids.tobytes())
    return digest.hexdigest()


def _setting(truth: TrueValues, context: RolloutContext, session: Session, point: int) -> str:
    """What all the values of a file have in common, as a name."""
    assert context.settings.sampling is not None
    settings = (
        repr(context.task),
        astuple(context.settings.sampling),
        context.settings.unfinished_reward,
        context.seed,
    )
    digest = hashlib.blake2b(repr((settings, truth.described())).encode(), digest_size=12)
    digest.update(weights_digest(session, point))
    return digest.hexdigest()


def weights_digest(session: Session, point: int) -> bytes:
    """Of the policy after `point` iterations: the same for equal weights alone."""
    from treetune_lab.analyzers.sources import policy_at

    weights: Mapping[str, object] = policy_at(session, point).state_dict()
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        import torch

        assert isinstance(tensor, torch.Tensor)
        digest.update(name.encode() + str(tensor.dtype).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def whole_ids(place: Place) -> TokenIds:
    """Prompt and beginning."""
    return joined([place.prompt_ids, place.begun_ids])
