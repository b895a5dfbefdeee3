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

"$binary" load-depth --model "$model" --json "${@:3}" >"$target/load-depth.json"

. "$here/venv.sh"
make_venv "$venv" "matplotlib==3.11.2"
exec "$venv/bin/python" "$here/load_depth.py" "$target/load-depth.json" "$target/load-depth.png"
