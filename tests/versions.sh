#!/usr/bin/env bash
# The default tests on both ends of the supported range of torch, each in an environment of its own.
#
#   tests/versions.sh [VERSION …]
#
# Each version installs its CUDA build, several gigabytes. The environments stay in $VERSIONS_DIR, if it is set.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.15.0)
folder=${VERSIONS_DIR:-$(mktemp -d)}
[ -n "${VERSIONS_DIR:-}" ] || trap 'rm -rf "$folder"' EXIT
failed=()

for version in "${versions[@]}"; do
    venv=$folder/torch-$version
    [ -x "$venv/bin/pytest" ] || {
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet "torch==$version" -e '.[dev,integrations]'
    }
    echo "+ torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
    # PYTHONPATH, because an environment that stays may have been installed from another checkout.
    PYTHONPATH=$PWD "$venv/bin/python" -m pytest -q || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed on: ${failed[*]}"; exit 1; }
