#!/usr/bin/env bash
# Starts a server on a free port and runs the official openai Python client against it.
#   openai_client.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: openai_client.sh BINARY MODEL.gguf}
model=${2:?usage: openai_client.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp)
"$binary" serve --model "$model" --port 0 --no-management --log-level warn >"$out" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -f "$out"' EXIT

url=
for _ in $(seq 600); do
  url=$(grep -o -m1 'http://[^ ]*' "$out" || true)
  [ -n "$url" ] && break
  kill -0 "$server" 2>/dev/null || { echo "the server did not start" >&2; exit 1; }
  sleep 0.1
done
[ -n "$url" ] || { echo "the server did not say where it listens" >&2; exit 1; }
"$here/run_openai_client.sh" "$url"

kill -TERM "$server"
wait "$server" || { echo "the server did not stop cleanly on SIGTERM" >&2; exit 1; }
