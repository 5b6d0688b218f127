"""Commands about machines: `plan` estimates what a run needs, `doctor` checks this machine, and
`serve_engine` and `serve_credit` serve other machines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from treetune.cli.command import PATH, Command, Options, build_root, evaluate_configuration, say

if TYPE_CHECKING:
    from treetune.engine.launch import ServerLaunch
    from treetune.models.shapes import Shape
    from treetune.models.sources import Alphabet, ModelSource
    from treetune.runtime.base import PolicyIteration
    from treetune.runtime.machine import Machine

SERVER_POLL_S = 0.5
CREDIT_KEY_VARIABLE = "TREETUNE_CREDIT_KEY"
"""The environment variable that holds the key of `serve_credit` if no `--key-file` is given."""


def serve_engine(options: Options) -> int:
    """Serves the policy. Returns 0 after an interruption. If the server ends by itself, returns its exit
    code, or 1 if that is 0."""
    # A shell may have made this process ignore the signals.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)
    root = cast(
        "PolicyIteration", build_root(evaluate_configuration(options), options.command, "an experiment")
    )
    from treetune.engine.serve_engine_servers import read_key

    try:
        with tempfile.TemporaryDirectory(prefix="treetune-start-weights-") as folder:
            launch = _make_launch(root, options.host, Path(folder))
            _make_key(options.key_file, "the run needs the same file")
            key = read_key(options.key_file)
            _write_start_weights(root, Path(folder))
            return serve_policy(launch, options.log, options.port, key, options.key_file)
    except KeyboardInterrupt:
        return 0


def _make_launch(root: PolicyIteration, host: str, weights: Path) -> ServerLaunch:
    """Returns the launch of a server like the run's own, except that it listens on `host`. Raises ValueError
    if the experiment has no engine of which a server could be started, or if a GPU is unusable."""
    import torch

    from treetune.engine.base import EngineLaunch
    from treetune.engine.launch import ServerLaunch
    from treetune.engine.settings import VllmSettings
    from treetune.trainer.ranks import refuse_unusable_gpu

    settings = root.engines.policy
    if not isinstance(settings, VllmSettings):
        raise ValueError("the experiment's engines.policy isn't 'vllm', of which a server could be started")
    refuse_unusable_gpu(os.environ, torch.version.cuda, torch.cuda.is_available())
    run = EngineLaunch(
        weights=weights,
        logs=Path(),  # unused: `serve` chooses the server's log
        seed=root.seed,
        context_length=root.context_length,
        device="cuda" if torch.cuda.is_available() else "cpu",
        # The run reaches this server by its address: through NCCL if the experiment chooses that, and else
        # through files.
        transfer="nccl" if settings.weight_transfer == "nccl" else "file",
    )
    # Without the settings that concern other servers, or a trainer on the same GPU.
    one_server = replace(settings, addresses=None, key_file=None, replicas=None, sleep=False, servers="one")
    return ServerLaunch(one_server, run, host=host)


def _make_key(path: Path, use: str) -> None:
    """Writes a new key into a file for this user alone, unless the file exists.

    Args:
        use: The use of the key, for the message about it, such as ``clients send this key``.
    """
    import secrets  # slow: it loads OpenSSL

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    say(f"a new key is in {path}, which only you can read: {use}")


def _write_start_weights(root: PolicyIteration, folder: Path) -> None:
    """Writes the weights that the server loads first: those of the model that the experiment starts from.

    A run sends its current weights to the server before it samples.
    """
    import torch

    from treetune.models.policy_files import write_for_engine
    from treetune.runtime.session import StartModel

    start = StartModel(root, torch.device("cpu"))
    weights, model_config = start.load_weights()
    write_for_engine(weights, model_config, start.tokenizer, folder)


def serve_policy(launch: ServerLaunch, log: Path | None, port: int, key: str, key_file: Path) -> int:
    """Starts the server, and serves until it ends.

    KeyboardInterrupt ends the server, and is raised again.

    Returns:
        The server's exit code, or 1 if that is 0, since a server should not end by itself.
    """
    from treetune.engine.client import SAMPLES_ROUTE, Client
    from treetune.engine.key import DESCRIPTION_VARIABLE
    from treetune.engine.launch import ServerProcess, diagnose_log, is_listening, read_last_lines
    from treetune.engine.serve_engine_servers import shared_settings
    from treetune.engine.server import make_warm_up_body
    from treetune.exceptions import ServerFailure

    log = log or Path(f"serve_engine-{port}.log")
    weights = launch.run.weights
    variables = {DESCRIPTION_VARIABLE: json.dumps(shared_settings(launch, weights))}
    process = ServerProcess(launch, weights, log, port=port, server_key=key, variables=variables)
    client = Client()
    say(f"starting a server at {process.url}; its log is {log}; Ctrl-C stops it")
    try:
        is_ready = False
        while (code := process.exit_code()) is None:
            if not is_ready and is_listening(port, launch.host):
                # The server is ready once it has sampled a token.
                try:
                    client.post(process.address(), SAMPLES_ROUTE, make_warm_up_body(1), timeout=60.0)
                except ServerFailure:
                    time.sleep(SERVER_POLL_S)
                    continue
                is_ready = True
                addresses, key_path = json.dumps([process.url]), json.dumps(str(key_file.resolve()))
                override = f"{{engines+: {{policy+: {{addresses: {addresses}, key_file: {key_path}}}}}}}"
                say(f"it is ready. For the run: --override {shlex.quote(override)}")
            time.sleep(SERVER_POLL_S)
        say(f"the server ended with code {code}.{diagnose_log(process.log_text())}\n{read_last_lines(log)}")
        return code or 1
    finally:
        client.close()
        process.end()


def serve_credit(options: Options) -> int:
    """Serves credit until it is interrupted, and returns 0."""
    # A signal makes uvicorn finish its requests. Then uvicorn raises the same signal once more, and this
    # handler turns it into a KeyboardInterrupt.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.default_int_handler)
    from treetune.cluster.credit_service.serving import make_settings, run_service

    try:
        key = _read_or_make_credit_key(options.key_file)
        most_bytes_of_request = options.megabytes * 1_000_000
        run_service(make_settings(options), key, options.host, options.port, most_bytes_of_request, say)
    except KeyboardInterrupt:
        pass
    return 0


def _read_or_make_credit_key(path: Path | None) -> str:
    """Returns the key in the file `path`, which is made with a new key if it isn't there. Without a path,
    returns the key in the environment variable. Raises ValueError if there is none."""
    from treetune.engine.serve_engine_servers import read_key

    if path is not None:
        _make_key(path, "clients send this key")
        return read_key(path, "--key-file", "the key that clients send")
    key = os.environ.get(CREDIT_KEY_VARIABLE, "").strip()
    if not key:
        raise ValueError(
            f"the service needs a key: give --key-file FILE, which is made if it isn't there, or set the"
            f" environment variable {CREDIT_KEY_VARIABLE}"
        )
    return key


def print_plan(options: Options) -> int:
    """Prints the plan. Returns 0 if the run fits the machine, 1 if it doesn't."""
    config = evaluate_configuration(options)
    root = cast("PolicyIteration", build_root(config, options.command, "an experiment"))
    from treetune.runtime.planning.plan import Plan
    from treetune.runtime.planning.report import as_data, as_text

    plan = Plan.of(root, _machine_of_options(options), options.answer_tokens, find_shape)
    say(json.dumps(as_data(plan), indent=2, ensure_ascii=False) if options.json else as_text(plan))
    fits_on_disk = plan.checkpoints.problem is None  # `plan.fits` doesn't look at the disk
    return 0 if plan.fits and fits_on_disk else 1


def _machine_of_options(options: Options) -> Machine:
    """Returns the machine that the command line describes; this machine if it describes none. Raises
    ValueError for an incomplete description."""
    from treetune.runtime.machine import make_described_machine, this_machine

    if (options.gpus is None) != (options.memory is None):
        raise ValueError("--gpus and --memory go together, as in --gpus 8 --memory 80: give both, or neither")
    if options.gpus is None:
        return this_machine()
    return make_described_machine(options.gpus, options.memory, options.machines, options.host_memory)


def find_shape(source: ModelSource, alphabet: Alphabet) -> Shape | None:
    """Returns the sizes of a model; None if they aren't known without loading the model.

    The model may be a checkpoint that isn't there yet. Then the sizes come from the experiment that makes the
    checkpoint. A shipped configuration has to describe this experiment; otherwise this raises ValueError.
    """
    try:
        return source.shape(alphabet)
    except ValueError:
        checkpoint = Path(getattr(source, "name_or_path", ""))
        config_file = _configuration_that_makes(checkpoint)
        if config_file is None:
            raise
        from treetune.config.jsonnet import load

        # Without the APP_* variables, which are meant for the experiment that is planned.
        config = load([str(config_file)], environment_keys=())
        earlier_root = cast("PolicyIteration", build_root(config, "plan", "an experiment"))
        # A checkpoint is as large as the model that its experiment starts from.
        return find_shape(earlier_root.model, earlier_root.task.alphabet)


def _configuration_that_makes(checkpoint: Path) -> Path | None:
    """Returns the shipped configuration whose experiment makes this checkpoint; None if there is none.

    Example: ``configs/quickstart/sft.jsonnet`` for ``experiments/quickstart/sft/checkpoints/last/policy``.
    """
    from treetune.config.layers import CONFIGS_FOLDER
    from treetune.models.policy_files import experiment_of_checkpoint

    experiment = experiment_of_checkpoint(checkpoint)
    if experiment is None:
        return None
    # The path begins with the folders that hold all experiments, such as `experiments`. It is unknown how
    # many these are, so all numbers are tried.
    for n_folders in range(1, len(experiment.parts)):
        *folders, last_part = experiment.parts[n_folders:]
        candidates = [[*folders, last_part]]
        if folders:
            # A table may put the experiments of a task into a folder of their own. So the experiment
            # signposts/slips/sft has the configuration signposts/slips_sft.jsonnet.
            candidates.append([*folders[:-1], f"{folders[-1]}_{last_part}"])
        for *candidate_folders, name in candidates:
            # Not `with_suffix`, which would cut a name with a dot, as in countdown/qwen2.5-3b_grpo.
            candidate = CONFIGS_FOLDER.joinpath(*candidate_folders, f"{name}.jsonnet")
            if candidate.is_file():
                return candidate
    return None


_POSITIVE_COUNT = click.IntRange(min=1)
_POSITIVE_AMOUNT = click.FloatRange(min=0.0, min_open=True)


def doctor(options: Options) -> int:
    from treetune.cluster.doctor import run

    return run()


COMMANDS = (
    Command(
        "plan",
        print_plan,
        "estimate memory, disk and time of a run, and whether it fits",
        "Estimates the memory of GPUs and host in each phase, the disk space of checkpoints, the sampled"
        " tokens and the seconds of an iteration. Shows what doesn't fit, and the smallest change that makes"
        " it fit; the exit code is then 1. It needs no GPU and loads no model.",
        (
            "treetune plan --configs configs/polIter_rho1bSft2_vineppo_MATH.jsonnet --gpus 4 --memory 80",
            "treetune plan --configs configs/quickstart/vineppo.jsonnet",
        ),
        (
            click.Option(
                ["--gpus"],
                type=_POSITIVE_COUNT,
                metavar="N",
                help="GPUs of a machine; default: this machine's",
            ),
            click.Option(["--memory"], type=_POSITIVE_AMOUNT, metavar="GIB", help="memory of each GPU"),
            click.Option(
                ["--machines"],
                type=_POSITIVE_COUNT,
                default=1,
                metavar="N",
                help="number of such machines; default: 1",
            ),
            click.Option(
                ["--host-memory"],
                type=_POSITIVE_AMOUNT,
                metavar="GIB",
                help="main memory of a machine; default: unlimited",
            ),
            click.Option(
                ["--answer-tokens"],
                type=_POSITIVE_AMOUNT,
                metavar="N",
                help="mean length of an answer; default: half of the longest",
            ),
            click.Option(["--json"], is_flag=True, help="print JSON, with sizes in bytes"),
        ),
        takes_files=True,
    ),
    Command(
        "serve_engine",
        serve_engine,
        "serve the policy from this machine to a run on another one",
        "Starts one server with the experiment's engines.policy, on the GPUs that this process sees, and"
        " keeps it until Ctrl-C. The run reaches it by engines.policy.addresses and key_file, and sends new"
        " weights through the experiment's folder, which this machine must see under the same path. Anybody"
        " who knows the key controls the server, and the key is sent unencrypted: use it in a private network"
        " only.",
        (
            "treetune serve_engine --configs configs/quickstart/vineppo.jsonnet --host 10.0.0.2 --port 8000"
            " --key-file engine.key",
        ),
        (
            click.Option(["--host"], required=True, metavar="ADDRESS", help="of this machine, to listen on"),
            click.Option(
                ["--port"],
                required=True,
                type=click.IntRange(1, 2**16 - 1),
                metavar="PORT",
                help="to listen on",
            ),
            click.Option(
                ["--key-file"],
                required=True,
                type=PATH,
                metavar="FILE",
                help="of mode 600; made if not there",
            ),
            click.Option(["--log"], type=PATH, metavar="FILE", help="default: serve_engine-PORT.log"),
        ),
        takes_files=True,
    ),
    Command(
        "serve_credit",
        serve_credit,
        "serve step-level credit to trainers on other machines or in other languages",
        "Answers POST /advantages, as JSON or Arrow, with the advantages that treetune.credit gives, until"
        " Ctrl-C. Continuations are sampled by the vLLM servers at --engine, and graded by --grader. Clients"
        " choose the credit, and send the key. GET /openapi.json has the schema, /health and /metrics the"
        " state. Requests are not encrypted: keep the service on this machine or in a private network, or"
        " behind a TLS proxy.",
        (
            "treetune serve_credit --key-file credit.key",
            "treetune serve_credit --engine http://127.0.0.1:8000 --tokenizer models/rho-1b --grader math"
            " --key-file credit.key",
        ),
        (
            click.Option(
                ["--engine"],
                multiple=True,
                metavar="ADDRESS",
                help="of a vLLM server with the policy, repeatable; or a folder with a model, or Jsonnet such"
                " as {type: 'plain_vllm', …}; default: only credit without continuations",
            ),
            click.Option(["--tokenizer"], metavar="FOLDER", help="of the policy"),
            click.Option(
                ["--grader"],
                metavar="NAME|'{…}'",
                help="of continuations: the type of a grader, or its configuration as Jsonnet",
            ),
            click.Option(["--host"], default="127.0.0.1", metavar="ADDRESS", help="to listen on"),
            click.Option(
                ["--port"],
                default=8200,
                type=click.IntRange(0, 2**16 - 1),
                metavar="PORT",
                help="to listen on; 0: any free one; default: 8200",
            ),
            click.Option(
                ["--key-file"],
                type=PATH,
                metavar="FILE",
                help=f"of mode 600; made if not there; default: the variable {CREDIT_KEY_VARIABLE}",
            ),
            click.Option(
                ["--credits"], metavar="A,B,…", help="that clients may choose; default: all that can be used"
            ),
            click.Option(
                ["--budget"], type=_POSITIVE_COUNT, metavar="N", help="most sampled tokens of a request"
            ),
            click.Option(
                ["--deadline"],
                type=_POSITIVE_AMOUNT,
                default=3600.0,
                metavar="SECONDS",
                help="most seconds of a request, while it waits and samples; default: 3600",
            ),
            click.Option(
                ["--megabytes"],
                type=_POSITIVE_COUNT,
                default=64,
                metavar="N",
                help="most megabytes of a request; default: 64",
            ),
            click.Option(
                ["--calls"],
                type=click.IntRange(1, 64),
                default=4,
                metavar="N",
                help="requests that are worked on at a time; others wait; default: 4",
            ),
        ),
    ),
    Command(
        "doctor",
        doctor,
        "check this machine (versions, memory, ports, a test generation)",
        "Checks versions, memory, ports and the compiler, and samples one token with the engine. It takes"
        " half a minute, or two minutes on a GPU, where vLLM compiles.",
        ("treetune doctor",),
    ),
)
