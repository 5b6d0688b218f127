"""Promises of the Docker and the Singularity image, tested without a container engine:

* both start from one pinned image, take the same steps of one script, and name the device;
* they hold all that a run needs, and a configuration of the paper finds its data in either;
* the Docker image is set up and started by a user who is not root, and owns the folders of its volumes.

`scripts/container/try_container.sh` builds and runs an image where buildah is installed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.setup.test_setup_scripts import Checkout

ROOT = Path(__file__).parents[2]
DOCKER, SINGULARITY = ROOT / "Dockerfile", ROOT / "singularity.def"
INSTALL = ROOT / "scripts/container/install.sh"
STEPS = ("system", "packages", "compile")
NEEDED_BY_A_RUN = ("run.sh", "scripts/setup.sh", "src/treetune/main.py", "configs/quickstart/vineppo.jsonnet")


def instructions() -> list[tuple[str, str]]:
    """List the Dockerfile's instructions and arguments; comments are left out, continued lines joined."""
    text = "\n".join(line for line in DOCKER.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def copies() -> list[tuple[list[str], str]]:
    """List the sources and the destination of every COPY."""
    result = []
    for name, arguments in instructions():
        if name == "COPY":
            *sources, destination = [word for word in shlex.split(arguments) if not word.startswith("--")]
            result.append((sources, destination))
    return result


def section(name: str) -> str:
    """Read a section of the Singularity definition."""
    match = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", SINGULARITY.read_text(), re.DOTALL | re.MULTILINE)
    assert match, f"singularity.def has no %{name}"
    return match[1]


def singularity_files() -> dict[str, str]:
    """Map the files that the Singularity image copies to their places in the image."""
    return dict(line.split() for line in section("files").splitlines() if line.strip())


def test_both_start_from_one_pinned_image_with_the_cuda_of_the_lock_file() -> None:
    docker = next(arguments.removeprefix("BASE=") for name, arguments in instructions() if name == "ARG")
    assert dict(instructions())["FROM"] == "${BASE}"
    assert f"From: {docker}" in SINGULARITY.read_text().splitlines()
    image = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu\d+\.\d+", docker)
    lock = (ROOT / "requirements.txt").read_text()
    pinned = re.search(r"^nvidia-cuda-runtime(?:-cu\d+)?==(\d+\.\d+)", lock, re.MULTILINE)
    assert image and pinned and image[1] == pinned[1]


def test_both_take_the_same_steps_of_one_script() -> None:
    called_step = re.compile(r"\./scripts/container/install\.sh (\w+)")
    docker = "\n".join(arguments for name, arguments in instructions() if name == "RUN")
    for steps in (docker, section("post")):
        assert tuple(called_step.findall(steps)) == STEPS
        assert not {"apt-get", "setup.sh", "compileall"} & set(re.split(r"[\s/]", called_step.sub("", steps)))


def write_stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_the_systems_packages_are_those_that_the_set_up_asks_for(tmp_path: Path) -> None:
    """A stand-in for the package manager records its calls."""
    script = tmp_path / "scripts/container/install.sh"
    script.parent.mkdir(parents=True)
    script.write_text(INSTALL.read_text().replace("/var/lib/apt/lists", f"{tmp_path}/lists"))
    calls = tmp_path / "asked"
    write_stand_in(tmp_path / "apt-get", f'echo "$*" >>{calls}')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", str(script), "system"], env=environment, check=True, timeout=60)
    update, install = calls.read_text().splitlines()
    assert update == "update"
    assert {"python3-venv", "python3-dev", "g++", "libnuma1", "bubblewrap"} <= set(install.split())
    assert "curl" in install.split(), "which the script for data fetches with"


@pytest.mark.parametrize(("keep", "left_in_folder"), [("", ["mine"]), ("1", ["mine", "treetune-container"])])
def test_an_existing_folder_stays_when_a_container_was_tried_in_it(
    keep: str, left_in_folder: list[str], tmp_path: Path
) -> None:
    """Stand-ins for the tools that build the container fail at once."""
    tools = {"buildah": "exit 1", "mmdebstrap": "exit 1", "id": "echo 0", "unshare": "exit 1"}
    for name, script in tools.items():
        write_stand_in(tmp_path / "bin" / name, script)
    folder = tmp_path / "a folder"
    (folder / "mine").mkdir(parents=True)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FOLDER": str(folder), "KEEP": keep}
    done = subprocess.run(
        ["bash", str(INSTALL.with_name("try_container.sh"))], env=environment, timeout=60, check=False
    )
    assert done.returncode == 1, "what was started inside failed"
    assert sorted(path.name for path in folder.iterdir()) == left_in_folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("packages",), "set TREETUNE_DEVICE to nvidia or cpu"), (("everything",), "usage"), ((), "usage")],
)
def test_an_unknown_step_and_a_missing_device_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        ["bash", INSTALL, *arguments],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and message in done.stderr


def test_the_docker_image_is_set_up_and_started_by_somebody_who_is_not_root() -> None:
    user, created = "root", {}
    for name, arguments in instructions():
        if name == "RUN" and (match := re.search(r"useradd .*--uid (\d+) (\w+)", arguments)):
            created[match[2]] = int(match[1])
        if name == "USER":
            user = arguments.strip()
        if name == "RUN" and "install.sh packages" in arguments:
            assert user != "root"
    assert user in created
    assert created[user] >= 1000
    before, after = DOCKER.read_text().split(f"USER {user}")
    assert f"chown -R {user} /treetune" in before
    assert all(line.startswith(f"COPY --chown={user} ") for line in after.splitlines() if "COPY" in line)


def test_all_copied_files_exist() -> None:
    sources = [*singularity_files()]
    for copied, _ in copies():
        sources += copied
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_the_images_hold_what_a_run_needs() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()]
    assert (["."], ".") in copies(), "the whole checkout, but for what .dockerignore says"
    for name in NEEDED_BY_A_RUN:
        parts = [name, *map(str, Path(name).parents)]
        for pattern in ignored:
            assert not any(fnmatch.fnmatch(part, pattern) for part in parts), f"{name} is left out"
        targets = [target for source, target in singularity_files().items() if source in parts]
        assert targets, f"singularity.def leaves {name} out"
    assert all(target == f"/treetune/{source}" for source, target in singularity_files().items())


PAPER = "configs/polIter_rho1bSft2_vineppo_MATH.jsonnet"


def test_a_configuration_of_the_paper_finds_its_data_in_either_image(tmp_path: Path) -> None:
    """The check runs in a tree of the files that singularity.def copies, with a link for the bound folder."""
    image, data = tmp_path / "treetune", tmp_path / "mine"
    image.mkdir()
    for name in singularity_files():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, image / name)
    assert "mkdir -p data" in section("post"), "a read-only image binds to what is there"
    bound = re.search(r"--bind \"\$PWD/data:(/treetune/data)\"", SINGULARITY.read_text())
    assert bound and bound[1] in DOCKER.read_text().split("VOLUME")[1]

    def output_of_check() -> str:
        command = [
            sys.executable,
            "src/treetune/main.py",
            "--configs",
            PAPER,
            "check_config",
            "--config-only",
        ]
        variables = os.environ | {"PYTHONPATH": "src"}
        done = subprocess.run(
            command, cwd=image, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    (image / "data").symlink_to(data)
    missing = "there is no file data/math/train.jsonl"
    assert missing in output_of_check()
    (data / "math").mkdir(parents=True)
    for split in ("train", "test"):
        rows = (
            {"problem": f"1 + {i}?", "solution": f"$\\boxed{{{1 + i}}}$", "answer": f"{1 + i}"}
            for i in range(1100)
        )
        (data / f"math/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The data of two evaluation sets stay missing.
    assert missing not in output_of_check()


def test_what_is_copied_before_the_set_up_is_enough_for_it(tmp_path: Path) -> None:
    """Stand-ins for Python and the compiler install nothing."""
    checkout = Checkout(tmp_path)
    files_of_checkout = {
        str(path.relative_to(checkout.path)) for path in checkout.path.rglob("*") if path.is_file()
    }
    copied_before: set[str] = set()
    for name, arguments in instructions():
        if name == "RUN" and "install.sh packages" in arguments:
            break
        if name == "COPY":
            copied_before |= {word for word in shlex.split(arguments)[:-1] if not word.startswith("--")}
    for name in files_of_checkout - copied_before:
        (checkout.path / name).unlink()
    checkout.tool("df", "#!/bin/bash\nprintf 'head\\nx x x 99999999 x x\\n'\n")
    done = checkout.run("scripts/setup.sh", TREETUNE_DEVICE="nvidia")
    assert done.returncode == 0, done.stderr
    assert "vllm==" in checkout.recorded_calls()


def test_both_name_the_device_since_an_image_is_built_without_a_gpu() -> None:
    assert ("ARG", "DEVICE=nvidia") in instructions()
    assert any(
        name == "ENV" and "TREETUNE_DEVICE=${DEVICE}" in arguments for name, arguments in instructions()
    )
    assert "TREETUNE_DEVICE=nvidia" in section("post")
    assert "TREETUNE_DEVICE=nvidia" in section("environment"), "or run.sh would set up another device's set"


def test_both_start_run_sh() -> None:
    assert instructions()[-1] == ("CMD", '["./run.sh"]')
    workdir = [arguments for name, arguments in instructions() if name == "WORKDIR"]
    assert workdir == ["/treetune"]
    assert section("runscript").strip().splitlines()[-1].strip() == "exec /treetune/run.sh"
    assert os.access(ROOT / "run.sh", os.X_OK)


def test_every_mention_of_a_container_gives_it_the_hosts_shared_memory() -> None:
    """Two versions of the weights lie there, so that no fixed size would be enough."""
    files_about_containers = (
        "Dockerfile",
        "docs/hardware.md",
        "docs/troubleshooting.md",
        "src/treetune/cluster/doctor.py",
    )
    assert [path for path in files_about_containers if "--ipc=host" not in (ROOT / path).read_text()] == []
    everything = [*ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("*.md"), DOCKER, SINGULARITY]
    assert [path for path in everything if "--shm-size" in path.read_text()] == []


def test_the_folders_of_volumes_belong_to_the_user_who_runs_there() -> None:
    """An empty volume takes the owner of the image's folder, and belongs to root where the image has none."""
    user, home = "root", ""
    owner_of: dict[str, str] = {}
    for name, arguments in instructions():
        if name == "USER":
            user = arguments.strip()
        elif name == "WORKDIR":
            home = arguments.strip()
        elif name == "RUN" and (match := re.fullmatch(r"mkdir -p ([\w ]+)", arguments.strip())):
            owner_of |= {f"{home}/{folder}": user for folder in match[1].split()}
        elif name == "VOLUME":
            volumes = json.loads(arguments)
    assert volumes and {owner_of[volume] for volume in volumes} == {"researcher"}
    places = dict(
        word.split("=") for name, arguments in instructions() if name == "ENV" for word in arguments.split()
    )
    named = {places["APP_DIRECTORY"], places["HF_HOME"], places["XDG_CACHE_HOME"], f"{home}/data"}
    assert named == set(volumes)
    compiled = ("TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    assert all(places[variable].startswith(places["XDG_CACHE_HOME"]) for variable in compiled)
    head = DOCKER.read_text().split("FROM")[0]
    assert all(f":{volume}" in head for volume in volumes), "the command says so"


def test_the_launcher_is_found_by_what_is_executed_in_the_singularity_image(tmp_path: Path) -> None:
    script = section("environment") + 'command -v deepspeed && echo "$PATH"'
    deepspeed = tmp_path / "treetune/.venv/bin/deepspeed"
    write_stand_in(deepspeed, "")
    script = script.replace("/treetune/", f"{tmp_path}/treetune/")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout.splitlines()[0] == str(deepspeed)
    assert done.stdout.strip().endswith(":/usr/bin:/bin")


def test_sources_are_compiled_and_files_that_do_not_compile_are_ignored(tmp_path: Path) -> None:
    script = tmp_path / "scripts/container/install.sh"
    script.parent.mkdir(parents=True)
    script.write_text(INSTALL.read_text())
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("A = 1\n")
    (tmp_path / "src/template.py").write_text("{{ no Python }}\n")
    done = subprocess.run(["bash", str(script), "compile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert list((tmp_path / "src").glob("__pycache__/a.*.pyc"))
