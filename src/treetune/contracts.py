"""The contracts between the parts of a configuration.

A part reports problems in one way: `Part.check(experiment)` yields findings of the level "error", "missing"
or "warning". `treetune.findings` collects them. There is no list of parts that fit together.

Many parts need the same things from others, such as advantages, or two answers to a problem. Such
requirements are declared: a part `gives` features and `needs` features. Each feature is a small class below
with its name in messages and the remedy if it is missing. Features are classes and not strings because a user
writes ``Need(Answers(2), "…")``: an editor finds the definition, mypy refuses a misspelling, and some
features compare amounts. docs/dev/architecture.md, section Contracts, lists who gives and who needs each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from typing_extensions import override

KeyPath = tuple[str, ...]

CONFIG_ROOT = "$"
"""The first step of a key that counts from the configuration's root, for findings about other parts. In
Jsonnet, too, ``$`` is the root."""


Level = Literal["error", "missing", "warning"]
"""The severity of a finding.

* ``error``: the configuration is wrong, here and everywhere. No command works on it.
* ``missing``: the part needs something that this machine doesn't have, such as a file, a GPU, a package or a
  key. `treetune check` ends with exit code 2, and every command that uses the part refuses to start. With
  ``--config-only``, for a run on another machine, `check` prints it as a note.
* ``warning``: worth knowing. Every command prints it as a note and works on.
"""


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy.

    `key` is the key to change. It is relative to the part that found the problem (``samples``,
    ``sets.0.name``; empty: the part itself), or begins with ``$`` and counts from the root
    (``$.rollout.samples``). Findings of the levels "missing" and "warning" are printed as notes, which
    consist only of `what`, so their `what` also names the remedy::

        Finding("samples is 1, and a group of one has no spread", "samples", "set it to 2 or more")
        Finding("bwrap isn't installed: apt-get install bubblewrap", level="missing")
    """

    what: str
    key: str | KeyPath = ""
    remedy: str = ""
    level: Level = "error"

    @staticmethod
    def of(error: ValueError, key: str | KeyPath, remedy: str = "") -> Finding:
        """Makes a finding of an exception.

        Without a `remedy`, the text after the last colon of the message is the remedy: messages of this
        project end with a colon and a remedy.
        """
        what, colon, message_remedy = str(error).rpartition(": ")
        if remedy or not colon:
            return Finding(str(error), key, remedy or "give it another value")
        return Finding(what, key, message_remedy)

    def path(self, part_key: KeyPath) -> KeyPath:
        """Returns the finding's key from the configuration's root on.

        Args:
            part_key: The key of the part that found the problem. The finding's key counts from there, unless
                it begins with `CONFIG_ROOT`.
        """
        steps = tuple(self.key.split(".")) if isinstance(self.key, str) else self.key
        if steps[:1] == (CONFIG_ROOT,):
            return steps[1:]
        return part_key + tuple(step for step in steps if step)  # the key "" is split into one empty step


def report_missing(messages: Iterable[str]) -> Iterator[Finding]:
    """Yields a finding of the level "missing" for each message. The messages name the remedies."""
    for message in messages:
        yield Finding(message, level="missing")


@dataclass(frozen=True)
class Feature:
    """Something that one part gives and another needs."""

    words: ClassVar[Any]
    """The name of the feature after "needs" in messages: a string, or a property that returns one."""
    remedy: ClassVar[str] = ""
    """The remedy if no part gives the feature."""

    def remedy_in(self, root: Any) -> str:
        """Returns the remedy for the configuration with this root, whose keys it may name."""
        return self.remedy

    def meets(self, needed: Feature) -> bool:
        """Returns whether this feature satisfies `needed`, a feature of the same type."""
        return True


@dataclass(frozen=True)
class Need:
    """A feature that a part needs, and the reason. If `remedy` is set, it replaces the feature's own.

    Example: ``Need(Answers(2), "it compares answers to the same problem")``.
    """

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


def innermost_rollout(rollout: Any, key: str = "$.rollout") -> tuple[Any, str]:
    """Returns the rollout that samples answers, and its key.

    Other rollouts may be around it, such as `until_mixed`, whose `rollout` it is. Example: for the rollout
    ``{type: 'until_mixed', rollout: {type: 'single_turn', …}, …}``, returns the `single_turn` and the key
    ``$.rollout.rollout``.

    Args:
        rollout: The outermost rollout.
        key: The key of the outermost rollout.
    """
    while (inner_rollout := getattr(rollout, "rollout", None)) is not None:
        rollout, key = inner_rollout, f"{key}.rollout"
    return rollout, key


class Part:
    """An object of a configuration that checks itself and others: its features, needs and findings."""

    @property
    def gives(self) -> tuple[Feature, ...]:
        return ()

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def check(self, experiment: Any) -> Iterable[Finding]:
        """Returns all problems that this part finds in `experiment`, which is the configuration's root.

        A problem is an error, something that this machine lacks, or a warning (`Level`).

        Bounds of a single value belong to its type, and contradictions among the part's own values to the
        constructor. Everything else is checked here. A check takes at most a second: it may read a file's
        first rows, open a connection or try the sandbox, and it imports nothing heavy.
        """
        return ()

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """Returns the keys of the part's settings that may change between the start of a run and its
        continuation.

        These settings say how work is carried out, where results are written and how results are measured.
        They never change the training.
        """
        return frozenset()


class Root:
    """The root of a configuration. `treetune check` may take longer to examine it than parts may take in
    `check`."""

    def examine(self, plain: Mapping[str, Any]) -> Iterable[str]:
        """Yields notes for the user, such as the first prompt with its reward.

        Every command calls `check`, which may take at most a second. Only the command `treetune check` calls
        this method, and only for a configuration in which no mistake has been found. So it may take longer.

        Args:
            plain: The configuration as plain data, as it was written.

        Raises:
            ConfigError: The configuration has mistakes that are slow to find.
        """
        return ()


# Features


@dataclass(frozen=True)
class TaskDemonstrations(Feature):
    """Responses of a task to learn from.

    A task whose settings leave it without demonstrations gives this feature with the reason. Example:
    ``TaskDemonstrations(why_none="the rows' demonstration_field is null")``.
    """

    why_none: str = ""

    remedy = "choose a task with demonstrations, or a rollout that samples, such as 'single_turn'"

    @property
    @override
    def words(self) -> str:
        return f"none ({self.why_none})" if self.why_none else "demonstrations of the task"

    @override
    def meets(self, needed: Feature) -> bool:
        return not self.why_none


class SampledAnswers(Feature):
    """Answers that the policy samples, with the engine's log-probs."""

    words = "answers that the policy samples"
    remedy = "choose a rollout that samples, such as 'single_turn'"


@dataclass(frozen=True)
class Answers(Feature):
    """A number of answers to each problem."""

    count: int

    remedy = "set the rollout's samples to 2 or more"

    @property
    @override
    def words(self) -> str:
        return f"{self.count} answer{'s' if self.count > 1 else ''} to each problem"

    @override
    def remedy_in(self, root: Any) -> str:
        # The rollout that samples may be inside another one, such as `until_mixed`. Its key is then
        # "rollout.rollout", for which the override is "{rollout+: {rollout+: {samples: 8}}}".
        _, key = innermost_rollout(getattr(root, "rollout", None), "rollout")
        override_text = "{samples: 8}"
        for step in reversed(key.split(".")):
            override_text = f"{{{step}+: {override_text}}}"
        return f"{self.remedy}, e.g. --override '{override_text}'"

    @override
    def meets(self, needed: Feature) -> bool:
        return isinstance(needed, Answers) and self.count >= needed.count


@dataclass(frozen=True)
class OneLine(Feature):
    """Answers without threads: each token was sampled with all tokens before it in view.

    If `turns` is true, an environment's replies may stand between the policy's tokens. If it is false, the
    policy wrote the whole answer.
    """

    turns: bool = False

    remedy = "choose a rollout such as 'single_turn', or a part that is made for threads or turns"

    @property
    @override
    def words(self) -> str:
        # "In one line" means without threads: each token was sampled with all tokens before it in view.
        if self.turns:  # an environment's replies between the policy's tokens are allowed
            return "answers in one line (threads don't see their siblings)"
        return (
            "answers in one line that the policy writes by itself (threads don't see their siblings, and"
            " turns have an environment's words between them)"
        )

    @override
    def meets(self, needed: Feature) -> bool:
        # A part that works with turns also works without them, but not the other way round.
        return isinstance(needed, OneLine) and (needed.turns or not self.turns)


class Forks(Feature):
    """Answers that may fork into threads."""

    words = "answers that fork into threads"
    remedy = "choose the rollout 'parallel_threads' (with parallel true)"


class Turns(Feature):
    """Answers of several turns, with an environment's replies between them."""

    words = "answers of several turns"
    remedy = "choose the rollout 'multi_turn'"


class Continuations(Feature):
    """Answers that continue other answers from the middle. Sampling them is most of an iteration's cost."""

    words = "continuations of answers"


class TextScores(Feature):
    """Log-probs of given texts, which the engine computes (`Engine.score`)."""

    words = "an engine that scores given texts"
    remedy = "choose the engine 'vllm', 'plain_vllm' or 'in_process'"


@dataclass(frozen=True)
class Advantages(Feature):
    """An advantage for each trained token.

    If `before_training` is true, advantages are computed before training begins. If it is false, a critic may
    compute them during training.
    """

    before_training: bool = False

    remedy = "choose a credit that gives them, such as 'group'"

    @property
    @override
    def words(self) -> str:
        return "advantages" + (" that are there before training begins" if self.before_training else "")

    @override
    def meets(self, needed: Feature) -> bool:
        # Advantages that exist before training also serve a part that needs them only during training.
        return isinstance(needed, Advantages) and (self.before_training or not needed.before_training)


class CentredRewards(Feature):
    """Advantages that estimate r − V(prompt), the same for all tokens of an answer: its reward minus a mean
    of its group's rewards. The difference is not normalised, such as by the group's standard deviation."""

    words = "advantages that are an answer's reward minus its group's mean"
    remedy = "set credit to {type: 'group', std: false}, or to {type: 'rloo'}"


class CriticValues(Feature):
    """Values from a critic that is trained together with the policy."""

    words = "values from a critic"


class CreditForRewards(Feature):
    """Credit for the rewards of whole answers, shaping included."""

    words = "a credit for what whole answers earn"
    remedy = "leave shaping empty, or choose a credit for whole answers, such as 'group'"


class CreditForTrees(Feature):
    """A credit for trees of answers: it trains a token that several answers share only once."""

    words = "a credit for answers that grow out of each other"
    remedy = "choose the credit 'tree', or 'monte_carlo'"


class UseOfAdvantages(Feature):
    """A loss that learns from advantages."""

    words = "an objective that learns from advantages"
    remedy = "choose an objective that does, such as 'ppo'"


class StaleAnswers(Feature):
    """A loss that can learn from answers of older weights, and corrects for the difference if necessary."""

    words = "an objective that corrects for answers of earlier weights"
    remedy = "set trainer.objective.importance_cap, such as 2 (objectives/importance_cap_2)"


class Pairs(Feature):
    """Pairs of a better and a worse answer to the same problem."""

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
