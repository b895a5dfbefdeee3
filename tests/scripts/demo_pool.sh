#!/usr/bin/env bash
# Many models in one pool, and what happens to them: see demo_pool.py.
#   demo_pool.sh BINARY MODEL.gguf [ARGUMENTS]     LLAMA_SERVER=/path/to/llama-server runs yours
# Without it: the one that pip carries, if this processor can run it; else the model `llama` stays failed.
set -euo pipefail
binary=${1:?usage: demo_pool.sh BINARY MODEL.gguf [ARGUMENTS]}
model=${2:?usage: demo_pool.sh BINARY MODEL.gguf [ARGUMENTS]}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

peer=${LLAMA_SERVER:-}
if [ -z "$peer" ] && grep -qw amx_tile /proc/cpuinfo; then
  . "$here/peer.sh"
  peer_of_pip target/peer
fi
mkdir -p target/peer
rm -f target/peer/current
if [ -n "$peer" ]; then
  ln -s "$(dirname "$(realpath "$peer")")" target/peer/current
else
  echo "no llama-server: the one that pip carries needs a processor with AMX (LLAMA_SERVER=/path for yours)" >&2
fi
exec python3 "$here/demo_pool.py" "$binary" "$model" --config tests/data/demo_pool.toml "$@"
