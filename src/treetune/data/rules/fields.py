"""Rules about a row's own fields: an expression, lengths, quotas of a domain, pass rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.data.difficulty.merging import RATES_FILE, rates_by_key
from treetune.data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune.data.templates import check_value, evaluate_expression
from treetune.domains.domain_rows import (
    DATA_SOURCE,
    GROUND_TRUTH,
    HIGH_PASS_RATE,
    LOW_PASS_RATE,
    REWARD_MODEL,
    DomainRow,
    domain_of,
    problem_of,
    prompt_text,
    row_key,
)
from treetune.exceptions import MissingField
from treetune.models.sources import ModelSource
from treetune.seeds import derive_seed
from treetune.vocabulary import TextCodec


@Rule.register("keep_where")
@dataclass(frozen=True, kw_only=True)
class KeepWhere(Rule):
    """Keeps rows for which the Jinja expression `where` is true, such as ``extra_info.level >= 3`` or
    ``reward_model.ground_truth | length <= 100``. Its names are the row's columns."""

    where: Annotated[str, MinLen(1)]
    name: str | None = None

    def __post_init__(self) -> None:
        check_value(self.where, "where")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows for which the expression isn't true."""
        dropped = {}
        for row in rows:
            try:
                stays = evaluate_expression(self.where, row.row)
            except MissingField as error:
                raise ValueError(f"{row.location}: {error}") from error
            if not stays:
                dropped[row.number] = f"not {self.where}"
        return Verdict(dropped)


@Rule.register("length")
@dataclass(frozen=True, kw_only=True)
class Length(Rule):
    """Drops rows whose prompt or ground truth is too long, or the prompt too short. Prompts are counted as
    the model is asked them, with its chat template where `model.chat` is set; characters need no model."""

    model: ModelSource | None = None
    """The model whose tokenizer counts."""
    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens of a prompt."""
    max_ground_truth_tokens: Annotated[int, Gt(0)] | None = None
    """The most tokens of a ground truth."""
    max_prompt_characters: Annotated[int, Gt(0)] | None = None
    """The most characters of a prompt."""
    min_prompt_characters: Annotated[int, Ge(0)] = 0
    """The fewest characters of a prompt."""
    max_ground_truth_characters: Annotated[int, Gt(0)] | None = None
    """The most characters of a ground truth."""
    name: str | None = None

    def __post_init__(self) -> None:
        tokens = (self.max_prompt_tokens, self.max_ground_truth_tokens)
        if any(tokens) and self.model is None:
            raise ValueError(
                "max_prompt_tokens and max_ground_truth_tokens need a model: name one, as an experiment does,"
                " or bound characters"
            )
        bounds = (*tokens, self.max_prompt_characters, self.max_ground_truth_characters)
        if not any(bounds) and not self.min_prompt_characters:
            raise ValueError("the rule 'length' bounds nothing: set max_prompt_tokens, or leave it out")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows whose prompt or ground truth is too short or too long."""
        # `_no_alphabet` raises an error for a model that asks for a task's alphabet: rows have none.
        codec = self.model.codec(self.model.load_tokenizer(_no_alphabet)) if self.model else None
        dropped = {}
        for index, row in enumerate(rows):
            if index % 256 == 0:
                context.progress(index, len(rows))
            if why := self._why_dropped(row.row, codec):
                dropped[row.number] = why
        return Verdict(dropped)

    def _why_dropped(self, row: DomainRow, codec: TextCodec | None) -> str | None:
        """Returns why a row is dropped, such as "a prompt of 5000 tokens"; None if it stays."""
        prompt, ground_truth = prompt_text(row), row[REWARD_MODEL][GROUND_TRUTH]
        if len(prompt) < self.min_prompt_characters or _exceeds(len(prompt), self.max_prompt_characters):
            return f"a prompt of {len(prompt)} characters"
        if _exceeds(len(ground_truth), self.max_ground_truth_characters):
            return f"a ground truth of {len(ground_truth)} characters"
        if codec is None:
            return None
        # Tokens are counted only if there is a bound, since that takes time.
        if self.max_prompt_tokens is not None:
            problem = problem_of(row, id="row")  # the tokens don't depend on the id
            n_tokens = len(codec.encode_prompt(problem))
            if n_tokens > self.max_prompt_tokens:
                return f"a prompt of {n_tokens} tokens"
        if self.max_ground_truth_tokens is not None:
            n_tokens = len(codec.encode(ground_truth))
            if n_tokens > self.max_ground_truth_tokens:
                return f"a ground truth of {n_tokens} tokens"
        return None


def _exceeds(length: int, bound: int | None) -> bool:
    return bound is not None and length > bound


def _no_alphabet() -> str:
    raise ValueError(
        "the model 'tiny' knows the characters of a task, and rows have none: give its alphabet, or take the"
        " model 'pretrained'"
    )


@Rule.register("quotas")
@dataclass(frozen=True, kw_only=True)
class Quotas(Rule):
    """Limits the number of rows of a domain (``math``), of a source (``math__dapo``), or of all together.

    The pipeline's seed and each row's content decide the order in which the rows of a domain are taken, so
    other domains and the order of the rows don't change it.
    """

    most: Mapping[str, Annotated[int, Ge(0)]] | None = None
    """The most rows of a domain or a source, by its name. A source that is named here counts apart from its
    domain."""
    total: Annotated[int, Gt(0)] | None = None
    """The most rows of all domains together. The share of each is in proportion to the rows that `most`
    leaves it."""
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.most and self.total is None:
            raise ValueError("quotas bound nothing: set most, e.g. {math: 5000}, or total, or leave them out")

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows of each data source, or of each domain, beyond its quota."""
        numbers_by_group: dict[str, list[int]] = defaultdict(list)
        random_keys: dict[int, int] = {}  # by the number of the row
        for row in rows:
            source = row.row[DATA_SOURCE]
            # A source that `most` names has a separate quota. The rows of other sources count for their
            # domain.
            group = source if source in (self.most or {}) else domain_of(source)
            numbers_by_group[group].append(row.number)
            random_keys[row.number] = derive_seed(context.seed, row_key(row.row), "quota")
        unknown = sorted(set(self.most or {}) - set(numbers_by_group))
        if unknown:
            existing_groups = ", ".join(sorted(numbers_by_group)) or "no rows"
            raise ValueError(
                f"quotas name {', '.join(unknown)}, and there are only {existing_groups}: leave them out"
            )
        # The order of the random keys decides which rows of a group stay.
        for numbers in numbers_by_group.values():
            numbers.sort(key=lambda number: (random_keys[number], number))
        quota_by_group: dict[str, int] = {}
        for group, numbers in numbers_by_group.items():
            most = self._quota(group)
            quota_by_group[group] = len(numbers) if most is None else min(most, len(numbers))
        if self.total is not None and sum(quota_by_group.values()) > self.total:
            quota_by_group = share_proportionally(quota_by_group, self.total)
        dropped: dict[int, str] = {}
        for group, numbers in numbers_by_group.items():
            quota = quota_by_group[group]
            for number in numbers[quota:]:
                dropped[number] = f"more than the {quota} that {group} may have"
        counts = {group: quota_by_group[group] for group in sorted(quota_by_group)}
        return Verdict(dict(sorted(dropped.items())), {"kept": counts})

    def _quota(self, group: str) -> int | None:
        return (self.most or {}).get(group)


def share_proportionally(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns shares of `total` in proportion to `sizes`. They are rounded by the method of largest
    remainders, so they add up to `total`."""
    total_size = sum(sizes.values())
    exact = {group: total * size / total_size for group, size in sizes.items()}
    shares = {group: int(share) for group, share in exact.items()}
    by_remainder = sorted(sizes, key=lambda group: (shares[group] - exact[group], group))  # largest first
    for group in by_remainder[: total - sum(shares.values())]:
        shares[group] += 1
    return shares


@Rule.register("pass_rates")
@dataclass(frozen=True, kw_only=True)
class PassRates(Rule):
    """Drops a row if the strong model's pass rate is `low` or less, since the row can't be solved, or if the
    weak model's pass rate is `high` or more, since there is nothing to learn from it.

    Rates from files are added to the rows: in the column ``low_pass_rate`` for the strong model, and in
    ``high_pass_rate`` for the weak one. A row without a rate is never taken for one of rate 0.
    """

    low: Annotated[float, Ge(0), Le(1)] | None = 0.1
    """The strong model's rate at or below which a row is dropped; null: no row is."""
    high: Annotated[float, Ge(0), Le(1)] | None = 0.9
    """The weak model's rate at or above which a row is dropped; null: no row is."""
    strong: str | None = None
    """The folder (or its rates.parquet) that `estimate_difficulty` wrote for the strong model; null: the rows
    have the rates in their column."""
    weak: str | None = None
    """The same for the weak model."""
    missing: Literal["keep", "drop", "stop"] = "stop"
    """What to do with rows without a rate: keep them, drop them, or stop the command. They are counted."""
    name: str | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("low and high are both null, so that no row would go: set one, or leave it out")

    @override
    def reads(self) -> Sequence[Path]:
        return [_rates_file(name) for name in (self.strong, self.weak) if name is not None]

    @override
    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Drops the rows that are too hard for the strong model, or too easy for the weak one."""
        dropped: dict[int, str] = {}  # of two reasons, the first one is kept (`setdefault`)
        values: dict[str, dict[int, float]] = {}  # rates that become columns of the rows
        missing_by_model: Counter[str] = Counter()
        for model in self._rated_models():
            rates = None if model.rates_path is None else rates_by_key(_rates_file(model.rates_path))
            for row in rows:
                if rates is None:
                    rate = row.row.get(model.column)
                else:
                    rate = rates.get(row_key(row.row))
                    if rate is not None:
                        values.setdefault(model.column, {})[row.number] = rate
                if model.bound is None:
                    continue
                if rate is None:
                    missing_by_model[model.name] += 1
                    reason = self._judge_without_rate(row.location, model)
                else:
                    reason = model.find_fault(rate)
                if reason is not None:
                    dropped.setdefault(row.number, reason)
        # Only the text before the colon is counted: the text after it may differ from row to row.
        reasons = Counter(why.partition(":")[0] for why in dropped.values())
        details = {"why": dict(reasons.most_common()), "without_a_rate": dict(missing_by_model)}
        return Verdict(dropped, details, columns=values)

    def _rated_models(self) -> list[_RatedModel]:
        return [
            _RatedModel("strong", LOW_PASS_RATE, self.strong, self.low),
            _RatedModel("weak", HIGH_PASS_RATE, self.weak, self.high),
        ]

    def _judge_without_rate(self, location: str, model: _RatedModel) -> str | None:
        """Returns the reason to drop a row without a rate; None if the row is kept. Raises ValueError if it
        stops the command."""
        missing_from = f" in {model.rates_path}" if model.rates_path else f": no {model.column}"
        reason = f"no rate of the {model.name} model{missing_from}"
        if self.missing == "stop":
            raise ValueError(
                f"{location} has {reason}: estimate its difficulty, or say with missing whether such rows"
                " stay ('keep') or go ('drop')"
            )
        return reason if self.missing == "drop" else None


@dataclass(frozen=True)
class _RatedModel:
    """A model whose pass rates decide whether rows are dropped."""

    name: str
    """``strong`` or ``weak``."""
    column: str
    """The rows' column of its rates."""
    rates_path: str | None
    """The folder or file of its rates; None: the rows have them in the column."""
    bound: float | None
    """The rate at which rows begin to be too hard or too easy; None: no row is dropped."""

    def find_fault(self, rate: float) -> str | None:
        """Returns the reason to drop a row with this rate; None if there is none."""
        assert self.bound is not None
        if self.name == "strong" and rate <= self.bound:
            return f"too hard: the strong model's rate is {rate:g}"
        if self.name == "weak" and rate >= self.bound:
            return f"too easy: the weak model's rate is {rate:g}"
        return None


def _rates_file(name: str) -> Path:
    """Returns the file of pass rates that `name`, a folder or the file itself, stands for. Raises ValueError
    if there is nothing of this name."""
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"there are no pass rates {name} (looked for in {Path.cwd()}): make them with"
            f" estimate_difficulty --output {name}, or set it to null where the rows hold their rates"
        )
    return path / RATES_FILE if path.is_dir() else path
