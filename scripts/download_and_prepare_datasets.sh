#!/usr/bin/env bash
# Fetches GSM8K, MATH, CollegeMath and OlympiadBench and prepares them under data/, as configs/tasks/ name them.
#
#   scripts/download_and_prepare_datasets.sh           everything that is missing
#   scripts/download_and_prepare_datasets.sh --paper   also the VinePPO paper's own splits, below data/paper/
#
# Run again, it continues where it stopped: a file that exists and has its checksum is not fetched again, and a file that
# came in part is completed. Where the network is missing, it says which file to put where; put there by
# hand, it is checked and prepared like any other. Ends with code 1 if anything is missing then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DATA=${TREETUNE_DATA:-data}
RAW=$DATA/downloads
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
SECONDS_WITHOUT_A_BYTE=30
SHOWN=$([ -t 2 ] && echo --progress-bar || echo --silent)
PAPER=

case "${1:-}" in
    "") ;;
    --paper) PAPER=1 ;;
    *) echo "usage: scripts/download_and_prepare_datasets.sh [--paper]" >&2; exit 2 ;;
esac

say() { printf 'data: %s\n' "$*" >&2; }
missing=0

sum_of() { sha256sum "$1" | cut -d' ' -f1; }

# fetch FILE URL [SHA256]: without a published checksum, the first download's is kept next to the file
fetch() {
    local file=$RAW/$1 url=$2 known=${3:-}
    mkdir -p "$(dirname "$file")"
    if [ -z "$known" ] && [ -f "$file.sha256" ]; then known=$(cat "$file.sha256"); fi
    if [ ! -f "$file" ]; then
        say "fetching $url"
        if ! curl --fail --location "$SHOWN" --show-error --retry 3 --continue-at - --connect-timeout 15 \
            --speed-limit 1 --speed-time "$SECONDS_WITHOUT_A_BYTE" --output "$file.part" "$url"; then
            say "could not fetch it. Fetch $url elsewhere and put it at $file"
            missing=1
            return 1
        fi
        mv "$file.part" "$file"
    fi
    if [ -n "$known" ] && [ "$(sum_of "$file")" != "$known" ]; then
        say "$file has the SHA-256 $(sum_of "$file"), not $known: remove it and fetch it again"
        missing=1
        return 1
    fi
    [ -n "${3:-}" ] || sum_of "$file" >"$file.sha256"
}

# prepare SET ARGUMENT…: see scripts/prepare_datasets.py
prepare() { "$PYTHON" scripts/prepare_datasets.py "$@" --data "$DATA" || missing=1; }

GSM8K=https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data
if fetch gsm8k/train.jsonl "$GSM8K/train.jsonl" \
        17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465 &&
    fetch gsm8k/test.jsonl "$GSM8K/test.jsonl" 3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14; then
    prepare gsm8k "$RAW/gsm8k"
fi

# The split of PRM800K, which the paper uses: 12,000 to train on, 500 to test on
MATH=https://media.githubusercontent.com/media/openai/prm800k/00811d6de065642a6967b9017d4cee59550c0ef4/prm800k/math_splits
if fetch math/train.jsonl "$MATH/train.jsonl" 90d96daeac3fe343ebb1e22ce93dd99690f75983e957f88de42f87cffe1e8076 &&
    fetch math/test.jsonl "$MATH/test.jsonl" 35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132; then
    prepare math "$RAW/math"
fi

if fetch college_math/test.jsonl https://huggingface.co/datasets/qq8933/College_Math_Test/resolve/main/college-math-test.jsonl; then
    prepare college_math "$RAW/college_math"
fi

if fetch olympiadbench/test.parquet https://huggingface.co/datasets/Hothan/OlympiadBench/resolve/refs%2Fconvert%2Fparquet/OE_TO_maths_en_COMP/train/0000.parquet; then
    prepare olympiadbench "$RAW/olympiadbench"
fi

if [ -n "$PAPER" ] &&
    fetch wandb_export_root.zip https://github.com/McGill-NLP/VinePPO/releases/download/latest/wandb_export_root.zip; then
    prepare paper "$RAW/wandb_export_root.zip"
fi

if [ "$missing" != 0 ]; then
    say "not everything is there; put what is missing where it was said, and run this again"
    exit 1
fi
say "all there, under $DATA/"
