#!/usr/bin/env bash
# Fetches the browser-side libraries of the viewer from npm, exactly those that are named here, and puts their
# minified files and licences into src/treetune/view/assets/vendor. Needed only to change a version.
#
#   ./scripts/viewer_assets.sh           fetch, check npm's hashes, write the files and their list
#   ./scripts/viewer_assets.sh --check   hold the files that are there against the list; needs no network
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../src/treetune/view/assets"

# name, version, npm's sha512 of the package, files to keep ("from>to"; folders end in /)
LIBRARIES=(
    "idiomorph 0.8.0 sha512-R47JBL+6jHDQvcnbppIUtXXcxi5h6+wuCEEZXnRhUltsgzPFKzThL5PuHppP9ypJuy+7WawcY1TsSBD/iQbMhw== dist/idiomorph.min.js>idiomorph.js"
    "uplot 1.6.32 sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw== dist/uPlot.iife.min.js>uplot.js dist/uPlot.min.css>uplot.css"
    "katex 0.19.1 sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA== dist/katex.min.js>katex/katex.js dist/katex.min.css>katex/katex.css dist/fonts/>katex/fonts/"
)

if [ "${1:-}" = --check ]; then
    cd vendor && sha256sum --check --quiet SHA256SUMS
    exit 0
fi
[ $# -eq 0 ] || { echo "usage: scripts/viewer_assets.sh [--check]" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
new=$work/vendor
mkdir -p "$new"
for line in "${LIBRARIES[@]}"; do
    read -r name version integrity files <<<"$line"
    (cd "$work" && npm pack --silent "$name@$version" >/dev/null)
    archive=$(echo "$work"/*.tgz)
    found=$(openssl dgst -sha512 -binary "$archive" | base64 -w0)
    if [ "sha512-$found" != "$integrity" ]; then
        echo "$name $version is not what this script knows: sha512-$found, and not $integrity" >&2
        exit 1
    fi
    tar -xzf "$archive" -C "$work"
    for file in $files; do
        from=$work/package/${file%%>*} to=$new/${file##*>}
        mkdir -p "$(dirname "$to")"
        case "$from" in
            */) mkdir -p "$to" && cp "$from"*.woff2 "$to" ;;
            *) cp "$from" "$to" ;;
        esac
    done
    cp "$work/package/LICENSE" "$new/LICENSE.${name%.org}"
    echo "$name $version" >>"$new/VERSIONS"
    rm -rf "$work/package" "$archive"
done
# Every browser of today reads woff2: the other formats are not shipped.
(cd "$new" && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
rm -rf vendor && mv "$new" vendor
echo "$(cat vendor/VERSIONS | wc -l) libraries in $PWD/vendor"
