"""What scripts/slurm asks a cluster for, and what its jobs start on every node.

There is no cluster: sbatch, srun, scontrol and `treetune` are stand-ins that write down what they
were asked for; srun also carries it out, once for each node.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = {
    "sbatch": """echo "sbatch $*" >>"$CALLS"; echo "$(($(grep -c ^sbatch "$CALLS") + 16));here\"""",
    "scontrol": """[ "$1 $2" = "show hostnames" ] && tr , '\\n' <<<"$3" """,
    "srun": """echo "srun $*" >>"$CALLS"
        while [ "$1" != bash ]; do case "$1" in --nodes=*) nodes=${1#*=} ;; esac; shift; done
        for ((i = 0; i < nodes; i++)); do SLURM_NODEID=$i "$@" || exit; done""",
}
LAUNCHER = """#!/bin/bash
interface=${GLOO_SOCKET_IFNAME:+ by $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME}
echo "treetune $* OMP_NUM_THREADS=$OMP_NUM_THREADS$interface" >>"$CALLS"
case "$*" in *"$FAIL_AT") [ -z "$FAIL_AT" ] || exit 7 ;; esac
"""
PYTHON = f"""#!/bin/bash
exec {sys.executable} "$@"
"""
JOB = {
    "SLURM_JOB_ID": "170123",
    "SLURM_JOB_NODELIST": "n7,n8,n9",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "96",
}


class Cluster:
    def __init__(self, path: Path) -> None:
        self.path = path / "a checkout"
        shutil.copytree(ROOT / "scripts/slurm", self.path / "scripts/slurm")
        for name in ("src", "configs"):
            (self.path / name).symlink_to(ROOT / name)
        self.calls = path / "calls"
        self.bin = path / "bin"
        self.bin.mkdir()
        for name, text in TOOLS.items():
            self.tool(self.bin / name, "#!/bin/bash\n" + text)
        (self.path / ".venv/bin").mkdir(parents=True)
        self.tool(self.path / ".venv/bin/python", PYTHON)
        self.tool(self.path / ".venv/bin/treetune", LAUNCHER)

    def tool(self, place: Path, text: str) -> None:
        place.write_text(text)
        place.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "CALLS": str(self.calls)} | environment
        return subprocess.run(
            ["bash", f"scripts/slurm/{script}", *arguments],
            cwd=self.path, env=variables, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def job(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """As sbatch runs it: a copy of the script, from elsewhere."""
        copy = self.path.parent / "spool"
        shutil.copy(self.path / "scripts/slurm/job.sh", copy)
        slurm = {"SLURM_SUBMIT_DIR": str(self.path), "TREETUNE_LOGS": "logs"} | JOB
        (self.path / "logs").mkdir(exist_ok=True)
        return self.run("../../../spool", *arguments, **slurm | environment)

    def asked(self, tool: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(f"{tool} ")]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_an_experiment_is_queued_with_what_the_reference_asks_for(cluster: Cluster) -> None:
    done = cluster.run("submit.sh", "configs/quickstart/grpo.jsonnet", NODES="4", LOGS="logs", APP_SEED="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17\n", "what another job may depend on, and nothing else"
    assert "queued job 17 of quickstart/grpo: 4 x 8 GPUs, log logs/slurm-17.out" in done.stderr
    (asked,) = cluster.asked("sbatch")
    for words in (
        "--job-name=quickstart/grpo-3 --output=logs/slurm-%j.out --nodes=4 --ntasks-per-node=1",
        "--gpus-per-node=8 --cpus-per-task=96 --mem=1000G --time=3-00:00:00 --dependency=singleton",
        " --exclusive ",
        "--requeue",
        "--signal=USR1@300",
    ):
        assert words in asked
    assert asked.endswith(" scripts/slurm/job.sh configs/quickstart/grpo.jsonnet")
    assert (cluster.path / "logs").is_dir()


def test_all_that_is_asked_for_can_be_set(cluster: Cluster) -> None:
    done = cluster.run(
        "submit.sh", "configs/quickstart/grpo.jsonnet", "run_evaluation", "run_analyzers",
        GPUS_PER_NODE="2", CPUS_PER_NODE="16", MEMORY="200G", TIME="1:00:00", PARTITION="short", ACCOUNT="us",
        QOS="low", JOBS="3", DEPENDENCY="afterok:4", JOB_NAME="mine", LOGS="logs",
        SBATCH_ARGUMENTS="--constraint=h100 --comment=x", SIGNAL_SECONDS="900",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "19\n"), done.stderr
    asked = cluster.asked("sbatch")
    assert len(set(asked)) == 1 and len(asked) == 3, "one after the other, by their name"
    for words in (
        "--job-name=mine --output=logs/slurm-%j.out --nodes=1 ",
        "--gpus-per-node=2 --cpus-per-task=16 --mem=200G --time=1:00:00 --dependency=singleton,afterok:4 ",
        " --signal=USR1@900 ",
        "--partition=short --account=us --qos=low --constraint=h100 --comment=x scripts/slurm/job.sh",
    ):
        assert words in asked[0]
    assert "--exclusive" not in asked[0]
    assert asked[0].endswith("grpo.jsonnet run_evaluation run_analyzers")


GRPO = "configs/quickstart/grpo.jsonnet"


@pytest.mark.parametrize(
    ("command", "environment", "told"),
    [
        (f"submit.sh {GRPO}", {"NODES": "two"}, "NODES is 'two'; it must be a whole number"),
        (f"submit.sh {GRPO}", {"JOBS": "0"}, "JOBS is '0'"),
        (f"submit.sh {GRPO}", {"SIGNAL_SECONDS": "soon"}, "SIGNAL_SECONDS is 'soon'"),
        (f"submit.sh {GRPO}", {"PYTHON": "no-such"}, "there is no no-such: run TREETUNE_DEVICE"),
        ("submit.sh configs/quickstart/gpro.jsonnet", {}, "no such file"),
        ("threadweaver.sh", {}, "usage: scripts/slurm/threadweaver.sh parallel|sequential"),
        ("threadweaver.sh both", {}, "usage"),
        ("threadweaver.sh parallel", {"STAGES": "rl sfft"}, "STAGES has 'sfft'; there are sft and rl"),
    ],
)
def test_nothing_is_queued_that_cannot_run(
    cluster: Cluster, command: str, environment: dict[str, str], told: str
) -> None:
    done = cluster.run(*command.split(), LOGS="logs", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert cluster.asked("sbatch") == []


def test_a_job_starts_the_launcher_once_on_each_of_its_nodes(cluster: Cluster) -> None:
    done = cluster.job("a.jsonnet,b.jsonnet")
    assert done.returncode == 0, done.stderr
    asked = cluster.calls.read_text().splitlines()
    sruns = [place for place, line in enumerate(asked) if line.startswith("srun ")]
    assert len(sruns) == 2
    train, evaluate = asked[: sruns[1]], asked[sruns[1] :]
    assert "--nodes=3 --ntasks-per-node=1 --cpus-per-task=96 --kill-on-bad-exit=1 bash" in train[0]
    for number, line in enumerate(train[1:]):
        launch = f"treetune run --node_rank {number} --nodes n7,n8,n9 --master_port 20123 --num_gpus 8"
        assert line == f"{launch} --configs a.jsonnet,b.jsonnet run_iteration_loop OMP_NUM_THREADS=12"
    assert [line.replace("run_evaluation", "run_iteration_loop") for line in evaluate] == train


def test_a_network_interface_is_named_to_both_libraries(cluster: Cluster) -> None:
    cluster.job("a.jsonnet", "run_iteration_loop", SOCKET_IFNAME="ib0")
    assert cluster.asked("treetune")[0].endswith(" by ib0 ib0")
    cluster.job("a.jsonnet", "run_iteration_loop")
    assert " by " not in cluster.asked("treetune")[0]


def test_a_job_whose_training_fails_evaluates_nothing_and_says_so(cluster: Cluster) -> None:
    done = cluster.job("a.jsonnet", FAIL_AT="run_iteration_loop")
    assert done.returncode == 7
    assert len(cluster.asked("srun")) == 1


def test_a_job_without_its_packages_says_how_to_get_them_or_runs_in_a_container(cluster: Cluster) -> None:
    (cluster.path / ".venv/bin/treetune").unlink()
    done = cluster.job("a.jsonnet")
    assert done.returncode == 2 and "TREETUNE_DEVICE=nvidia ./scripts/setup.sh" in done.stderr
    cluster.tool(cluster.bin / "container", '#!/bin/bash\necho "container $*" >>"$CALLS"\n')
    done = cluster.job("a.jsonnet", "run_evaluation", RUN_IN="container exec x.sif")
    assert done.returncode == 0, done.stderr
    assert cluster.asked("container")[0].startswith("container exec x.sif treetune run --node_rank 0 ")


@pytest.mark.parametrize("form", ["parallel", "sequential"])
def test_a_form_is_fine_tuned_and_then_trained_from_that(cluster: Cluster, form: str) -> None:
    (cluster.path / "mine.jsonnet").write_text("{ seed: 5 }")
    done = cluster.run("threadweaver.sh", form, CONFIGS="mine.jsonnet", LOGS="logs")
    assert (done.returncode, done.stdout) == (0, "18\n"), done.stderr
    sft, rl = cluster.asked("sbatch")
    assert f"--job-name=threadweaver/sft_{form}-5 " in sft and f"--job-name=threadweaver/{form}-5 " in rl
    assert "--nodes=1 " in sft and "--dependency=singleton " in sft
    assert "--nodes=4 " in rl and "--dependency=singleton,afterok:17 " in rl
    assert sft.endswith(f" configs/threadweaver/sft_{form}.jsonnet,mine.jsonnet")
    assert rl.endswith(f" configs/threadweaver/{form}.jsonnet,mine.jsonnet")


def test_one_stage_can_be_queued_alone_on_other_nodes(cluster: Cluster) -> None:
    done = cluster.run(
        "threadweaver.sh", "parallel", STAGES="rl", NODES="2", DEPENDENCY="afterany:4", LOGS="logs"
    )
    assert done.returncode == 0, done.stderr
    (rl,) = cluster.asked("sbatch")
    assert "threadweaver/parallel-" in rl and "--nodes=2 " in rl and "singleton,afterany:4 " in rl
