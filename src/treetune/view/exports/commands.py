"""Commands that export from experiments: evaluations, notes, and checkpoints with a model card."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from treetune.cli.command import PATH, Command, Options, say

if TYPE_CHECKING:
    from treetune.view.exports.card import Licences


def export_evaluation(options: Options) -> int:
    from treetune.view.exports.evaluations import choose_evaluation, write_parquet
    from treetune.view.exports.inspect_log import write_inspect_log

    writers = {".eval": write_inspect_log, ".json": write_inspect_log, ".parquet": write_parquet}
    write = writers.get(options.output.suffix)
    if write is None:
        raise ValueError(
            f"{options.output} must end in {' or '.join(writers)}: the suffix chooses the format"
        )
    evaluation = choose_evaluation(options.experiment, options.set, options.iteration)
    count = write(evaluation, options.output)
    say(f"{count} answers of {evaluation.label} after iteration {evaluation.iteration}: {options.output}")
    return 0


def export_notes_as_data(options: Options) -> int:
    from treetune.view.notes import check_format, export_notes, notes_of

    check_format(options.output.suffix)
    notes = notes_of(options.experiments)
    export_notes(notes, options.output)
    say(f"{len(notes)} note{'s' if len(notes) != 1 else ''}: {options.output}")
    return 0


def model_card(options: Options) -> int:
    from treetune.store.files import write_text
    from treetune.view.exports.card import checkpoint_at, describe_missing_facts, make_model_card

    checkpoint, licences = checkpoint_at(options.checkpoint), _licences_of_options(options)
    card = str(make_model_card(checkpoint, licences))
    if options.output is None:
        say(card)
    else:
        write_text(options.output, card)
        say(str(options.output))
    absent = describe_missing_facts(checkpoint, licences)
    if absent:
        print(f"note: the card has no {', '.join(absent)}", file=sys.stderr)
    return 0


def push_to_hub(options: Options) -> int:
    from treetune.view.exports.card import checkpoint_at, make_parcel, push_parcel

    parcel = make_parcel(checkpoint_at(options.checkpoint), options.repository, _licences_of_options(options))
    if options.dry_run:
        say(parcel.card)
        say(f"This would be uploaded to {parcel.repository} ({'private' if options.private else 'public'}):")
        for line in parcel.lines():
            say(f"  {line}")
        return 0
    say(push_parcel(parcel, private=options.private))
    return 0


def _licences_of_options(options: Options) -> Licences:
    from treetune.view.exports.card import Licences

    return Licences(weights=options.license, data=options.data_license, base_model=options.base_model)


def _output_option(formats: str) -> click.Option:
    """Returns the option for the output file. `formats` says which suffixes the file can have."""
    help_text = f"its suffix chooses the format: {formats}"
    return click.Option(["--output"], required=True, type=PATH, metavar="FILE", help=help_text)


CHECKPOINT_ARGUMENT = click.Argument(
    ["checkpoint"], type=PATH, metavar="CHECKPOINT", help="such as EXPERIMENT_DIR/checkpoints/last"
)
# Options of both commands that make a card.
CARD_OPTIONS = (
    click.Option(["--license"], metavar="NAME", help="of the weights, such as apache-2.0"),
    click.Option(["--data-license"], metavar="NAME", help="of the training data"),
    click.Option(
        ["--base-model"],
        metavar="OWNER/NAME",
        help="the start model's name on the hub, if it was loaded from a folder",
    ),
)

COMMANDS = (
    Command(
        "export_evaluation",
        export_evaluation,
        "export an evaluation as an Inspect log or as Parquet",
        "Writes the answers of one evaluation with their grades, as a log that `inspect view` and"
        " `inspect_ai.log.read_eval_log` read (.eval, or .json), or as Parquet.",
        (
            "treetune export_evaluation experiments/quickstart/vineppo --output vineppo.eval",
            "treetune export_evaluation experiments/quickstart/vineppo --set test --iteration 8"
            " --output vineppo.parquet",
        ),
        (
            click.Argument(["experiment"], type=PATH, metavar="EXPERIMENT_DIR"),
            click.Option(["--set"], metavar="NAME", help="of the evaluation; default: the only one"),
            click.Option(["--iteration"], type=int, metavar="N", help="default: the newest"),
            _output_option(".eval, .json or .parquet"),
        ),
    ),
    Command(
        "export_notes",
        export_notes_as_data,
        "export notes and labels on answers as a data set",
        "Writes the notes that people made on answers in `treetune view`, a row per note: prompt, answer,"
        " score, advantage, labels, note, author, time.",
        ("treetune export_notes experiments/quickstart/vineppo --output notes.parquet",),
        (
            click.Argument(["experiments"], nargs=-1, required=True, type=PATH, metavar="EXPERIMENT_DIR..."),
            _output_option(".parquet or .jsonl"),
        ),
    ),
    Command(
        "model_card",
        model_card,
        "write the model card of a checkpoint",
        "Writes what the Hugging Face hub shows of a model: method, results with their intervals, data and"
        " its licence, base model, versions, configuration, and how to make the weights again.",
        (
            "treetune model_card experiments/quickstart/vineppo/checkpoints/last --license mit --output"
            " README.md",
        ),
        (
            CHECKPOINT_ARGUMENT,
            *CARD_OPTIONS,
            click.Option(["--output"], type=PATH, metavar="FILE", help="default: print it"),
        ),
    ),
    Command(
        "push_to_hub",
        push_to_hub,
        "send a checkpoint with its model card to the Hugging Face hub",
        "Makes the repository where there is none and puts the weights and their card into it, in one commit."
        " The token is the environment's HF_TOKEN. --dry-run shows what would be sent, without a network.",
        (
            "treetune push_to_hub experiments/quickstart/vineppo/checkpoints/last me/vineppo-tiny --license"
            " mit --dry-run",
        ),
        (
            CHECKPOINT_ARGUMENT,
            click.Argument(["repository"], metavar="OWNER/NAME"),
            *CARD_OPTIONS,
            click.Option(["--private"], is_flag=True, help="create the repository as private"),
            click.Option(["--dry-run"], is_flag=True, help="print what would be uploaded"),
        ),
    ),
)
