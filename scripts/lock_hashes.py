"""Writes the hashes of a lock file: scripts/lock_hashes.py requirements*.txt

A pin is a line `name==version`, with a marker or a comment behind it; hashes that it had are replaced. Listed
are all files of that version which pip may choose on Linux (x86-64, aarch64; glibc) with Python 3.11 to 3.14,
and its source. They are asked of the index that pip is configured for; builds with a version of their own,
such as torch's for the CPU, of --own-builds. A pin for which the index can't be asked, or doesn't have the
version, keeps the hashes that it has; it is told, and the script ends with 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin

from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from pip._vendor.packaging.version import Version

PIN = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[^\s;\\]+)(?P<marker> *;[^#\\]*[^#\\\s])?[\s\\]*(?P<comment>#.*)?"
)
HASH = re.compile(r"\s*--hash=(sha256:[0-9a-f]{64})[\s\\]*")
OWN_BUILDS = "https://download.pytorch.org/whl/cpu"
JSON = "application/vnd.pypi.simple.v1+json"


class Links(HTMLParser):
    """File names and hashes of an index's page."""

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
        if answer.headers.get_content_type() == JSON:
            return {one["filename"]: one["hashes"]["sha256"] for one in json.loads(text)["files"]}
    page = Links()
    page.feed(text)
    return page.files


def may_be_chosen(file: str, version: str) -> bool:
    """Whether pip may choose this file for the pin on one of the machines and Pythons that are supported."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == Version(version)
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:  # an egg, an installer, a name from before there were rules
        return False
    return found == Version(version) and any(
        (tag.platform == "any" or re.fullmatch(r"(many)?linux.*_(x86_64|aarch64)", tag.platform))
        and (
            re.fullmatch(r"cp31[1-4]", tag.abi)
            or (tag.abi == "abi3" and re.fullmatch(r"cp3(\d|1[0-4])", tag.interpreter))
            or (tag.abi == "none" and re.fullmatch(r"py3(\d|1[0-4])?|cp31[1-4]", tag.interpreter))
        )
        for tag in tags
    )


def hashes_of(index: str, package: str, version: str) -> list[str] | str:
    """Returns the hashes of a version, or why there are none."""
    try:
        files = files_of(index, package)
    except OSError as error:
        return str(error)
    found = sorted(f"sha256:{digest}" for file, digest in files.items() if may_be_chosen(file, version))
    return found or "the index has no file of this version"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("locks", nargs="+", type=Path, metavar="LOCK")
    options.add_argument("--own-builds", default=OWN_BUILDS, metavar="URL")
    given = options.parse_args()
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    index = configured.stdout.strip() or PyPI.simple_url
    failures = 0
    for lock in given.locks:
        lines = lock.read_text().splitlines()
        pins = {number: pin for number, line in enumerate(lines) if (pin := PIN.fullmatch(line))}
        with ThreadPoolExecutor(8) as pool:
            asked = {
                number: pool.submit(
                    hashes_of,
                    given.own_builds if "+" in pin["version"] else index,
                    pin["name"],
                    pin["version"],
                )
                for number, pin in pins.items()
            }
        written: list[str] = []
        for number, line in enumerate(lines):
            if number not in pins:
                if not HASH.fullmatch(line):
                    written.append(line)
                continue
            pin, hashes = pins[number], asked[number].result()
            if isinstance(hashes, str):
                failures += 1
                why = hashes
                had = itertools.takewhile(bool, map(HASH.fullmatch, lines[number + 1 :]))
                hashes = [one[1] for one in had if one]
                print(
                    f"{lock}: {pin['name']}=={pin['version']} keeps its {len(hashes)} hashes: {why}",
                    file=sys.stderr,
                )
            requirement = f"{pin['name']}=={pin['version']}{pin['marker'] or ''}"
            written.append(" \\\n".join([requirement, *(f"    --hash={one}" for one in hashes)]))
            if pin["comment"]:
                written.append(f"    {pin['comment']}")
        lock.write_text("\n".join(written) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
