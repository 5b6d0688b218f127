"""What the parts of a configuration say about each other.

A part says that something is wrong in one way: `Part.check(experiment)` yields a `Finding`, of the level
"error", "missing" or "warning". `treetune.findings` collects them. Nobody lists which parts go together.

Many parts need the same things of many others, such as advantages, or two answers to a problem. These are
declared: a part `gives` features and `needs` features. Each feature is a small class below that says how
messages name it and what to do where it is missing. It is a class, and not a name in a table, since a user
writes ``Need(Answers(2), "…")``, where an editor and mypy find what it means and refuse a misspelling; three
of them also compare amounts. docs/dev/architecture.md, section Contracts, shows who gives and who needs each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from typing_extensions import override

KeyPath = tuple[str, ...]

ROOT = "$"
"""Begins the key of a finding that is about another part: as in Jsonnet, the whole configuration."""


Level = Literal["error", "missing", "warning"]
"""How bad a finding is.

* ``error``: the configuration is wrong, here and everywhere. No command works on it.
* ``missing``: the part needs something that this machine doesn't have, such as a file, a GPU, a package or a
  key. `treetune check` ends with exit code 2, and every command that uses the part refuses to start. With
  ``--config-only``, for a run on another machine, `check` prints it as a note.
* ``warning``: worth knowing, and nothing is refused. Every command tells it as a note.
"""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what would be right.

    `key` is the key to change, from the part that found it on (``samples``, ``sets.0.name``; empty: the
    part itself), or from the root on where it begins with ``$`` (``$.rollout.samples``). A note shows `what`
    alone, so that findings of a lower level name their remedy there::

        Finding("samples is 1, and a group of one has no spread", "samples", "set it to 2 or more")
        Finding("bwrap isn't installed: apt-get install bubblewrap", level="missing")
    """

    what: str
    key: str | KeyPath = ""
    remedy: str = ""
    level: Level = "error"

    @staticmethod
    def of(error: ValueError, key: str | KeyPath, remedy: str = "") -> Finding:
        """Returns the finding of an exception. Messages of ours end in a colon and the remedy: without a
        `remedy`, what follows the last colon is it."""
        what, colon, message_remedy = str(error).rpartition(": ")
        if remedy or not colon:
            return Finding(str(error), key, remedy or "give it another value")
        return Finding(what, key, message_remedy)

    def path(self, part: KeyPath) -> KeyPath:
        """Returns the key from the root on, for a finding of the part that stands at `part`."""
        steps = tuple(self.key.split(".")) if isinstance(self.key, str) else self.key
        if steps[:1] == (ROOT,):
            return steps[1:]
        return part + tuple(step for step in steps if step)


def lacking(messages: Iterable[str]) -> Iterator[Finding]:
    """Yields what this machine lacks, a finding for each message; each names its remedy."""
    for message in messages:
        yield Finding(message, level="missing")


@dataclass(frozen=True)
class Feature:
    """Something that one part gives and another needs."""

    words: ClassVar[Any]
    """Names the feature, to be put behind "needs": a text, or a property where it depends on fields."""
    remedy: ClassVar[str] = ""
    """What to do where nothing gives it."""

    def meets(self, needed: Feature) -> bool:
        """Returns whether this one, of the same type, is enough where `needed` is needed."""
        return True


@dataclass(frozen=True)
class Need:
    """A feature that a part can't do without, what the part does with it, and what to do if not the usual."""

    feature: Feature
    because: str
    remedy: str = ""


class Experiment(Protocol):
    """The attributes of an experiment that a part may look at when it checks itself."""

    task: Any
    model: Any
    engines: Any
    rollout: Any
    credit: Any
    selection: Any
    trainer: Any
    evaluation: Any
    iterations: int
    problems_per_iteration: int | None
    context_length: int
    restart: str


class Part:
    """An object of a configuration that has something to say about the rest of it."""

    @property
    def gives(self) -> tuple[Feature, ...]:
        return ()

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def check(self, experiment: Any) -> Iterable[Finding]:
        """Returns all that is wrong with this part in `experiment`, the configuration's root, whatever the
        level; see `Level`.

        It is the one way to say so. A constructor only refuses values that contradict each other by
        themselves, and bounds of single values stand in their types. It takes a moment at most (it may read
        a file's first rows, open a connection or try the sandbox), and it imports nothing heavy.
        """
        return ()

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """Returns the keys, from the part's settings, with which a run that has begun may go on otherwise:
        how work is carried out, where it is written, how it is measured; never what is trained."""
        return frozenset()


class Root:
    """The root of a configuration. `treetune check` may take longer to examine it than parts may take in
    `check`."""

    def examine(self, plain: Mapping[str, Any]) -> Iterable[str]:
        """Yields notes for the user; `plain` is the configuration as it was written. Raises ConfigError for
        mistakes that take long to find."""
        return ()


# Features


class SampledAnswers(Feature):
    """Answers that the policy samples, with the engine's log-probs."""

    words = "answers that the policy samples"
    remedy = "choose a rollout that samples, such as 'single_turn'"


@dataclass(frozen=True)
class Answers(Feature):
    """A number of answers to each problem."""

    count: int

    remedy = "set the rollout's samples to 2 or more, e.g. --override '{rollout+: {samples: 8}}'"

    @property
    @override
    def words(self) -> str:
        return f"{self.count} answer{'s' if self.count > 1 else ''} to each problem"

    @override
    def meets(self, needed: Feature) -> bool:
        return isinstance(needed, Answers) and self.count >= needed.count


@dataclass(frozen=True)
class OneLine(Feature):
    """Answers whose tokens were each sampled after all before it, so without threads. With `turns`, an
    environment may speak in between; else an answer is what the policy writes by itself."""

    turns: bool = False

    remedy = "choose a rollout such as 'single_turn', or a part that is made for threads or turns"

    @property
    @override
    def words(self) -> str:
        if self.turns:
            return "answers in one line (threads don't see their siblings)"
        return (
            "answers in one line that the policy writes by itself (threads don't see their siblings, and"
            " turns have an environment's words between them)"
        )

    @override
    def meets(self, needed: Feature) -> bool:
        return isinstance(needed, OneLine) and (needed.turns or not self.turns)


class Forks(Feature):
    """Answers that may fork into threads."""

    words = "answers that fork into threads"
    remedy = "choose the rollout 'parallel_threads' (with parallel true)"


class Turns(Feature):
    """Answers of several turns, between which an environment speaks."""

    words = "answers of several turns"
    remedy = "choose the rollout 'multi_turn'"


class Continuations(Feature):
    """Answers that are begun again from their middle: what samples them costs most of an iteration."""

    words = "continuations of answers"


@dataclass(frozen=True)
class Advantages(Feature):
    """An advantage for each trained token; `before_training`, or from a critic while it trains."""

    before_training: bool = False

    remedy = "choose a credit that gives them, such as 'group'"

    @property
    @override
    def words(self) -> str:
        return "advantages" + (" that are there before training begins" if self.before_training else "")

    @override
    def meets(self, needed: Feature) -> bool:
        return isinstance(needed, Advantages) and (self.before_training or not needed.before_training)


class CriticValues(Feature):
    """Values from a critic that is trained beside the policy."""

    words = "values from a critic"


class CreditForRewards(Feature):
    """Credit for what whole answers earn, shaping included."""

    words = "a credit for what whole answers earn"
    remedy = "leave shaping empty, or choose a credit for whole answers, such as 'group'"


class CreditForTrees(Feature):
    """A credit that trains tokens once which several answers share."""

    words = "a credit for answers that grow out of each other"
    remedy = "choose the credit 'tree', or 'monte_carlo'"


class UseOfAdvantages(Feature):
    """A loss that learns from advantages."""

    words = "an objective that learns from advantages"
    remedy = "choose an objective that does, such as 'ppo'"


class StaleAnswers(Feature):
    """A loss that learns from answers of earlier weights than those it begins with, and corrects for it where
    it has to."""

    words = "an objective that corrects for answers of earlier weights"
    remedy = "set trainer.objective.importance_cap, such as 2 (objectives/importance_cap_2)"


class Pairs(Feature):
    """A better and a worse answer to the same problem, side by side."""

    words = "pairs of answers"
    remedy = "choose the selection 'preference_pairs'"


class UseOfPairs(Feature):
    """A loss that compares two answers."""

    words = "an objective that compares pairs"
    remedy = "choose the objective 'dpo' or 'dpo_positive', or the selection 'all'"


class WholeBatch(Feature):
    """All answers of an iteration, wrong ones among them."""

    words = "all answers of the batch"
    remedy = "choose the selection 'all'"
