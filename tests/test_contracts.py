"""Promises of the check that the parts of an experiment fit together (`needs`, `gives` and `check`):

* all mistakes of keys, types and combinations are told at once, each with its key and once;
* a need is met by the nearest part that gives its feature, and an unreadable value is neither guessed nor
  asked;
* a finding is a mistake, a warning, or a lack of this machine, and only a mistake refuses a configuration;
* the documents list every feature.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.shipped import experiment_of, issues_of, loaded
from treetune.config.build import build, check_root
from treetune.config.registrable import Registrable
from treetune.contracts import Feature, Finding, Need, Part
from treetune.exceptions import ConfigError, Incomplete
from treetune.findings import UNKNOWN, collect_findings, missing_requirements
from treetune.main import main
from treetune.runtime.base import Runtime
from treetune.tables.settings import Table

GRPO, VINEPPO = "quickstart/grpo", "quickstart/vineppo"


def test_mistakes_of_keys_types_and_combinations_are_told_together() -> None:
    issues = issues_of(
        VINEPPO,
        "{iteratons: 3, trainer+: {learning_rate: 'fast', objective: {type: 'mle'}}, experiment_name: '../x',"
        " evaluation+: {sets: [{split: 'test', samples: 4, temperature: 0}]}}",
    )
    assert {issue.key for issue in issues} == {
        "iteratons",
        "trainer.learning_rate",
        "credit",
        "experiment_name",
        "selection.type",
        "evaluation.sets.0.temperature",
    }


def test_what_depends_on_a_value_that_could_not_be_read_is_not_guessed() -> None:
    (issue,) = issues_of(VINEPPO, "{context_length: 'long'}")
    assert issue.key == "context_length"
    (issue,) = issues_of(GRPO, "{credit: {type: 'grup'}}")
    assert issue.key == "credit.type"


def test_a_missing_feature_is_one_finding_however_many_parts_need_it() -> None:
    issues = issues_of(VINEPPO, "{rollout: {type: 'demonstrations'}}")
    assert len(issues) == 1
    assert "'monte_carlo'" in issues[0].what
    assert "'ppo'" in issues[0].what


def test_an_experiment_that_was_made_in_a_program_is_checked_by_one_call() -> None:
    right = experiment_of(GRPO)
    assert check_root(right) is right
    with pytest.raises(ConfigError, match="needs 2 answers"):
        check_root(replace(right, rollout=replace(right.rollout, samples=1)))


# A family, two features and a root that the package doesn't know


@dataclass(frozen=True)
class Warmth(Feature):
    degrees: int
    remedy = "light a fire"

    @property
    def words(self) -> str:
        return f"{self.degrees} degrees"

    def meets(self, needed: Feature) -> bool:
        return isinstance(needed, Warmth) and self.degrees >= needed.degrees


class Inhabitant(Registrable):
    pass


@Inhabitant.register("stove")
@dataclass(frozen=True)
class Stove(Inhabitant):
    degrees: int = 20

    @property
    def gives(self) -> tuple[Feature, ...]:
        return (Warmth(self.degrees),)


@Inhabitant.register("cat")
@dataclass(frozen=True)
class Cat(Inhabitant):
    needs = (Need(Warmth(18), "it sleeps"),)

    def check(self, experiment: House) -> Iterable[Finding]:
        if experiment.dogs > 1:
            yield Finding(f"{experiment.dogs} dogs are too many for a cat", "$.dogs", "give one away")


@dataclass(frozen=True)
class Room(Part):
    guests: tuple[Inhabitant, ...] = ()


@dataclass(frozen=True)
class House(Part):
    guests: tuple[Inhabitant, ...] = ()
    inner: Room = Room()
    dogs: int = 0


def messages_of_findings(root: House) -> list[str]:
    return [f"{'.'.join(key)}: {finding.what}" for key, finding in collect_findings(root)]


def test_a_need_is_met_by_what_stands_beside_the_part_or_beside_what_holds_it() -> None:
    assert messages_of_findings(House(guests=(Cat(), Stove()))) == []
    assert messages_of_findings(House(guests=(Stove(),), inner=Room((Cat(),)))) == []
    lacking = "guests 'cat' (it sleeps) needs 18 degrees, and nothing here gives that"
    assert messages_of_findings(House(guests=(Cat(),))) == [f"guests.0: {lacking}"]
    assert messages_of_findings(House(guests=(Cat(),), inner=Room((Stove(),)))) != []


def test_the_nearest_part_that_gives_a_feature_decides() -> None:
    cold = House(guests=(Stove(30),), inner=Room((Cat(), Stove(5))))
    (only,) = messages_of_findings(cold)
    assert only.endswith("needs 18 degrees, and what is given is 5 degrees")


def test_a_part_can_check_by_a_method_what_it_cannot_declare() -> None:
    assert messages_of_findings(House(guests=(Cat(), Stove()), dogs=2)) == [
        "dogs: 2 dogs are too many for a cat"
    ]


def test_an_unreadable_value_meets_every_need_and_raises_when_it_is_used() -> None:
    assert messages_of_findings(House(guests=(Cat(), UNKNOWN))) == []
    assert messages_of_findings(House(guests=(Cat(), Stove(UNKNOWN)), dogs=UNKNOWN)) == []
    for use in (lambda: UNKNOWN > 3, lambda: UNKNOWN.label, lambda: list(UNKNOWN), lambda: f"{UNKNOWN}"):
        with pytest.raises(Incomplete):
            use()


def test_a_message_of_an_exception_is_divided_into_mistake_and_remedy() -> None:
    finding = Finding.of(ValueError("two: three: do this"), "a.b")
    assert (finding.what, finding.remedy, finding.path(("x",))) == ("two: three", "do this", ("x", "a", "b"))


def test_every_kind_of_root_is_checked() -> None:
    """A root that isn't known as one would be built unchecked, and nobody would notice."""
    for configs in (GRPO, "tables/quickstart_methods"):
        data = loaded(configs).data
        family = Runtime if "trainer" in data else Table
        with pytest.raises(ConfigError):
            build(family, data | {"experiment_name" if family is Runtime else "name": "../x"})


# Levels of findings


@dataclass(frozen=True)
class Heater(Part):
    plug: str = "round"

    def check(self, experiment: House) -> Iterable[Finding]:
        if self.plug == "round":
            yield Finding("there is no round socket here: buy an adapter", level="missing")
        if self.plug == "none":
            yield Finding("it has no plug", "plug", "set it to 'round'")
        if experiment.dogs:
            yield Finding("dogs like to lie before it", level="warning")


def test_a_part_says_what_this_machine_lacks_in_the_same_way_as_what_is_wrong() -> None:
    room = {"within": [Heater(), Heater(plug="none")]}
    assert missing_requirements([room], House()) == ["there is no round socket here: buy an adapter"]
    assert missing_requirements([room], House(), kind=Inhabitant) == []
    # Without a root, a part says what it can say before it looks at it.
    assert missing_requirements([Heater()]) == ["there is no round socket here: buy an adapter"]


def test_warnings_are_told_and_refuse_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "hub.jsonnet"
    config.write_text(
        "(import 'quickstart/grpo.jsonnet') + {task: {type: 'math', train: [], validation: [], test: [],"
        " source: {type: 'hub', name: 'a/b', revision: 'c'}}}"
    )
    assert main(["--configs", str(config), "check_config", "--config-only"]) == 0, capsys.readouterr().err
    notes = " ".join(capsys.readouterr().err.split())
    assert notes.count("note: the rows of the data set are not checked") == 1


@pytest.mark.parametrize("former", ["missing", "notes", "remarks"])
def test_a_part_with_a_method_that_is_no_longer_called_is_refused_by_name(
    former: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Inhabitant, "_parts", Inhabitant.parts_by_name()
    )  # what is registered here is gone afterwards
    part = type("Hamster", (Inhabitant,), {former: lambda self, experiment: ["it sleeps by day"]})
    with pytest.raises(TypeError, match=f"has `{former}`, which is no longer called: yield .*Finding"):
        Inhabitant.register("hamster")(part)
    assert "hamster" not in Inhabitant.parts_by_name()
    # A key of that name is a part's own affair.
    Inhabitant.register("parrot")(type("Parrot", (Inhabitant,), {former: ("it talks",)}))


def test_the_documents_list_every_feature() -> None:
    page = (Path(__file__).parents[1] / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    features = {
        feature.__name__ for feature in Feature.__subclasses__() if feature.__module__ == "treetune.contracts"
    }
    assert len(features) == 18 and features <= named
