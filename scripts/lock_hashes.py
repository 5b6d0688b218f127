"""Writes the hashes of a lock file: scripts/lock_hashes.py requirements*.txt

A pin is a line `name==version`, perhaps with a marker and a comment. Its hashes are replaced by those of its
source and of all files of that version which pip may choose on Linux (x86-64, aarch64; glibc) with Python
3.11 to 3.14. The index that pip is configured for has them; --own-builds has those of builds with a version
of their own, such as torch's for the CPU. A pin keeps its hashes if the index can't be asked or doesn't have
the version. The script names such pins, and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin

from pip._internal.models.index import PyPI
from pip._vendor.packaging.tags import Tag
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from pip._vendor.packaging.version import Version

PIN = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)(?P<marker> *;[^#\\]*[^#\\\s])?[\s\\]*(?P<comment>#.*)?"
)
HASH = re.compile(r"\s*--hash=(sha256:[0-9a-f]{64})[\s\\]*")
OWN_BUILDS = "https://download.pytorch.org/whl/cpu"
JSON = "application/vnd.pypi.simple.v1+json"
REQUESTS_AT_ONCE = 8


# Files of an index


class Links(HTMLParser):
    """Reads the names and hashes of files from an index's page."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") or ""
        if tag == "a" and "#sha256=" in href:
            path, _, digest = href.partition("#sha256=")
            self.files[unquote(path.rpartition("/")[2])] = digest


def files_of(index: str, package: str) -> dict[str, str]:
    """Returns the sha256 of each file that an index has of a package, by the file's name."""
    url = urljoin(index.rstrip("/") + "/", canonicalize_name(package) + "/")
    request = urllib.request.Request(url, headers={"Accept": f"{JSON}, text/html;q=0.1"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
        is_json = answer.headers.get_content_type() == JSON
    if is_json:
        return {file["filename"]: file["hashes"]["sha256"] for file in json.loads(text)["files"]}
    page = Links()
    page.feed(text)
    return page.files


def may_be_chosen(file: str, version: str) -> bool:
    """Returns whether pip may choose a file for a pin, on one of the supported machines and Pythons."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == Version(version)
        _, version_of_file, _, tags = parse_wheel_filename(file)
    except ValueError:  # an egg, an installer, or a name from before there were rules
        return False
    return version_of_file == Version(version) and any(is_supported(tag) for tag in tags)


def is_supported(tag: Tag) -> bool:
    """Returns whether a wheel with this tag fits one of the supported machines and Pythons."""
    if tag.platform != "any" and not re.fullmatch(r"(many)?linux.*_(x86_64|aarch64)", tag.platform):
        return False
    if tag.abi == "abi3":  # the stable ABI of a Python fits all later ones
        return re.fullmatch(r"cp3(\d|1[0-4])", tag.interpreter) is not None
    if tag.abi == "none":
        return re.fullmatch(r"py3(\d|1[0-4])?|cp31[1-4]", tag.interpreter) is not None
    return re.fullmatch(r"cp31[1-4]", tag.abi) is not None


def hashes_of(index: str, package: str, version: str) -> list[str]:
    """Returns the hashes of the files of a version that pip may choose.

    Raises:
        OSError: if the index can't be asked.
        ValueError: if it has no such file.
    """
    hashes = []
    for file, digest in files_of(index, package).items():
        if may_be_chosen(file, version):
            hashes.append(f"sha256:{digest}")
    if not hashes:
        raise ValueError("the index has no file of this version")
    return sorted(hashes)


# Lock files


def update_lock(lock: Path, index: str, own_builds: str) -> int:
    """Writes the hashes of all pins of a lock file. Returns the number of pins that keep theirs."""
    lines = lock.read_text().splitlines()
    pins = {}
    for number, line in enumerate(lines):
        pin = PIN.fullmatch(line)
        if pin is not None:
            pins[number] = pin
    hashes: dict[int, Future[list[str]]] = {}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for number, pin in pins.items():
            index_of_pin = own_builds if "+" in pin["version"] else index
            hashes[number] = pool.submit(hashes_of, index_of_pin, pin["name"], pin["version"])

    failures = 0
    new_lines: list[str] = []
    for number, line in enumerate(lines):
        if number not in pins:
            if not HASH.fullmatch(line):  # a pin writes its own hashes
                new_lines.append(line)
            continue
        pin = pins[number]
        requirement = f"{pin['name']}=={pin['version']}"
        try:
            hashes_of_pin = hashes[number].result()
        except (OSError, ValueError) as error:
            failures += 1
            hashes_of_pin = read_hashes(lines[number + 1 :])
            print(f"{lock}: {requirement} keeps its {len(hashes_of_pin)} hashes: {error}", file=sys.stderr)
        options = [f"    --hash={digest}" for digest in hashes_of_pin]
        new_lines.append(" \\\n".join([requirement + (pin["marker"] or ""), *options]))
        if pin["comment"]:
            new_lines.append(f"    {pin['comment']}")
    lock.write_text("\n".join(new_lines) + "\n")
    return failures


def read_hashes(lines: Sequence[str]) -> list[str]:
    """Returns the hashes with which some lines begin."""
    hashes = []
    for line in lines:
        match = HASH.fullmatch(line)
        if match is None:
            break
        hashes.append(match[1])
    return hashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("locks", nargs="+", type=Path, metavar="LOCK")
    parser.add_argument("--own-builds", default=OWN_BUILDS, metavar="URL")
    options = parser.parse_args()
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    index = configured.stdout.strip() or PyPI.simple_url
    failures = sum(update_lock(lock, index, options.own_builds) for lock in options.locks)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
