"""Promise of a model folder's digest: it depends on the content alone, and neither on times nor on the
path.
"""

import os
import shutil
from pathlib import Path

import pytest

from treetune.models import digests
from treetune.models.digests import folder_digest


def folder(tmp_path: Path, weights: bytes = b"abc" * 1000) -> Path:
    path = tmp_path / "policy"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_the_digest_depends_on_content_alone(tmp_path: Path) -> None:
    policy = folder(tmp_path)
    before = folder_digest(policy)
    os.utime(policy / "model.safetensors", (1, 1))
    copy = shutil.copytree(policy, tmp_path / "elsewhere")
    assert folder_digest(policy) == folder_digest(copy) == before
    stat = (copy / "model.safetensors").stat()
    (copy / "model.safetensors").write_bytes(b"abc" * 999 + b"abd")  # the same size
    os.utime(copy / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert folder_digest(copy) != before
    (policy / "tokenizer.json").write_text("{}")
    assert folder_digest(policy) != before


def test_the_digest_of_a_large_file_depends_on_its_size_ends_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WHOLE_BYTES", 100), ("SAMPLED_BLOCKS", 10), ("SAMPLE_BYTES", 10)):
        monkeypatch.setattr(digests, name, value)
    content = bytes(range(250)) * 4
    policy = folder(tmp_path, content)
    before = folder_digest(policy)
    file = policy / "model.safetensors"
    for changed in (b"x" + content[1:], content[:-1] + b"x", content + b"x", bytes(b ^ 1 for b in content)):
        file.write_bytes(changed)
        assert folder_digest(policy) != before
