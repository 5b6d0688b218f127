#!/usr/bin/env bash
# Builds the documentation site from docs/ into build/site, with the reference that the code gives (docs/reference/). A broken link ends it with an error. To read it with search:
# .venv/bin/python -m http.server --bind 127.0.0.1 --directory build/site
#
# Arguments go to mkdocs: ./scripts/docs.sh --quiet
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-docs.txt >/dev/null; then
    echo "docs.sh: the packages of requirements-docs.txt could not be installed" >&2
    exit 1
fi
.venv/bin/python scripts/make_reference.py
NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict "$@"
echo "build/site/index.html"
