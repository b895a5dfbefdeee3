#!/usr/bin/env bash
# The conformance suite of the runtimes against a real llama-server with the demo model; then the same questions to
# that llama-server and to this build, and their answers compared field by field.
#   llama_server.sh BINARY MODEL.gguf [ARGUMENTS of cargo test]      LLAMA_SERVER=/path/to/llama-server runs yours
# Without it: the one that pip carries, if this processor can run it.
set -euo pipefail
binary=$(realpath "${1:?usage: llama_server.sh BINARY MODEL.gguf [ARGUMENTS of cargo test]}")
model=$(realpath "${2:?usage: llama_server.sh BINARY MODEL.gguf [ARGUMENTS of cargo test]}")
shift 2
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
peer=$(realpath "$peer")
TINYLOOP_LLAMA_SERVER=$peer cargo test --quiet "$@" --test runtimes llama_server_real

. "$here/serve.sh"
serve "$binary" --model "$model" --no-management
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
LD_LIBRARY_PATH=$(dirname "$peer") "$peer" --model "$model" --host 127.0.0.1 --port "$port" --ctx-size 4096 \
  --parallel 2 --threads 2 >"$serve_folder/llama-server" 2>&1 &
other=$!
trap 'kill "$other" "${servers[@]}" 2>/dev/null || true; rm -rf "$serve_folder"' EXIT
until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
  kill -0 "$other" || { tail -5 "$serve_folder/llama-server" >&2; exit 1; }
  sleep 0.2
done
python3 "$here/llama_fields.py" "http://127.0.0.1:$port" "$url"
stop_servers
