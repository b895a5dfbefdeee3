#!/usr/bin/env bash
# Overload with an objective on the first token: a server that may grant fewer loops against one that
# only refuses. Prints the table; the figures and the picture go to target/load-depth.{json,png}.
#   load_depth.sh BINARY MODEL [ARGUMENTS of tinyloop load-depth..]
# matplotlib lives in a virtual environment under target/, made once.
set -euo pipefail
binary=${1:?usage: load_depth.sh BINARY MODEL [ARGUMENTS..]}
model=${2:?usage: load_depth.sh BINARY MODEL [ARGUMENTS..]}
here=$(cd "$(dirname "$0")" && pwd)
target=$here/../../target
venv=$target/plot
wanted="matplotlib==3.11.2"

"$binary" load-depth --model "$model" --json "${@:3}" >"$target/load-depth.json"

if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv --clear "$venv" 2>/dev/null || {
    # Debian ships venv apart from python3; virtualenv from pip does the same.
    rm -rf "$venv"
    python3 -m pip install --quiet --disable-pip-version-check --target "$venv-tool" virtualenv
    PYTHONPATH="$venv-tool" python3 -m virtualenv --quiet "$venv"
  }
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted"
  echo "$wanted" >"$venv/installed"
fi
exec "$venv/bin/python" "$here/load_depth.py" "$target/load-depth.json" "$target/load-depth.png"
