#!/usr/bin/env bash
# Print a Python that has Harbor and what this project's bridges to it need (no torch), made once in .venv-harbor.
# Fails, with the reason on standard error, where there is no Python >= 3.12 or Harbor can't be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=.venv-harbor
STAMP=$VENV/.t1-setup
WANTED=$(cat scripts/harbor_python.sh pyproject.toml | sha256sum | cut -d' ' -f1)

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANTED" ]; then
    echo "$PWD/$VENV/bin/python"
    exit 0
fi
works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }
for candidate in python3.12 python3.13 python3 ${PYENV_ROOT:+"$PYENV_ROOT"/versions/3.12*/bin/python}; do
    if works "$candidate"; then
        timeout 300 "$candidate" -m venv "$VENV" >&2
        timeout 300 "$VENV/bin/python" -m pip --disable-pip-version-check -qq install -e '.[harbor]' >&2 || exit 1
        echo "$WANTED" > "$STAMP"
        echo "$PWD/$VENV/bin/python"
        exit 0
    fi
done
echo "harbor: no Python >= 3.12; the tests of the bridges are skipped" >&2
exit 1
