#!/bin/sh
# Makes .venv and installs requirements.txt into it. Safe to run again; instant when nothing changed.
#   PYTHON=python3.12 ./setup.sh                                      uses that interpreter
#   VENV=.venv-floor REQUIREMENTS=requirements-floor.txt ./setup.sh   the oldest versions, beside it
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
venv=${VENV:-.venv}
requirements=${REQUIREMENTS:-requirements.txt}

if ! command -v "$python" >/dev/null; then
    echo "setup.sh: error: no $python found; install Python 3.11 or newer, or name one with PYTHON=..." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup.sh: error: $("$python" --version) is too old; Python 3.11 or newer is needed (PYTHON=python3.12 ./setup.sh)" >&2
    exit 1
fi
if [ -x "$venv/bin/python" ] && cmp -s "$requirements" "$venv/installed.txt"; then
    exit 0
fi

echo "setup.sh: installing $requirements into $venv (a few minutes the first time)" >&2
"$python" -m venv "$venv" || {
    echo "setup.sh: error: cannot make $venv; on Debian and Ubuntu install python3-venv" >&2
    exit 1
}
quiet=--quiet
if [ -t 2 ]; then quiet=; fi # pip's own progress, on a terminal
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check -r "$requirements" >&2
cp "$requirements" "$venv/installed.txt"
echo "setup.sh: done" >&2
