#!/usr/bin/env bash
# The conformance suite of the runtimes against a real llama-server with the demo model.
#   llama_server.sh [ARGUMENTS of cargo test]      LLAMA_SERVER=/path/to/llama-server runs yours
# Without it: the one that pip carries, if this processor can run it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

peer=${LLAMA_SERVER:-}
if [ -z "$peer" ]; then
  if ! grep -qw amx_tile /proc/cpuinfo; then
    echo "SKIPPED: the llama-server that pip carries needs a processor with AMX, which this one lacks;" \
      "LLAMA_SERVER=/path/to/llama-server runs another. Its stand-in was tested." >&2
    exit 0
  fi
  . "$here/peer.sh"
  peer_of_pip target/peer
fi
TINYLOOP_LLAMA_SERVER=$(realpath "$peer") exec cargo test --quiet "$@" --test runtimes llama_server_real
