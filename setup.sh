#!/bin/sh
# Makes .venv and installs requirements.txt into it. Safe to run again; instant when nothing changed.
#   ./setup.sh --dev                          also requirements-dev.txt, for tests and checks
#   VENV=.venv-floor ./setup.sh --dev --floor the oldest versions that are tested, beside it
#   PYTHON=python3.12 ./setup.sh              that interpreter
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
venv=${VENV:-.venv}

wanted=$(cat requirements.txt)
for flag in "$@"; do
    case $flag in
        --dev) dev=yes ;;
        --floor) # the pins of requirements.txt but for those that the floor has
            wanted=$(awk -F== 'NR == FNR { pinned[$1]; print; next } !($1 in pinned)' requirements-floor.txt requirements.txt)
            ;;
        *)
            echo "setup.sh: error: $flag: no such flag; there are --dev and --floor" >&2
            exit 2
            ;;
    esac
done
if [ "${dev:-}" ]; then
    wanted="$wanted
$(cat requirements-dev.txt)"
fi

if ! command -v "$python" >/dev/null; then
    echo "setup.sh: error: no $python found; install Python 3.11 or newer, or name one with PYTHON=..." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup.sh: error: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed (PYTHON=python3.12 ./setup.sh)" >&2
    exit 1
fi
if [ -x "$venv/bin/python" ] && [ -f "$venv/installed.txt" ]; then
    case $(cat "$venv/installed.txt") in
        "$wanted"*) exit 0 ;; # what is there may hold more, as after --dev
    esac
fi

echo "setup.sh: installing into $venv (a few minutes the first time)" >&2
"$python" -m venv "$venv" || {
    echo "setup.sh: error: cannot make $venv; on Debian and Ubuntu install python3-venv" >&2
    exit 1
}
echo "$wanted" >"$venv/wanted.txt"
quiet=--quiet
if [ -t 2 ]; then quiet=; fi # pip's own progress, on a terminal
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check -r "$venv/wanted.txt" >&2
mv "$venv/wanted.txt" "$venv/installed.txt"
echo "setup.sh: done" >&2
