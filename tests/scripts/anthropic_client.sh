#!/usr/bin/env bash
# Starts servers on free ports and runs the official anthropic Python client against them: one as it is, and
# two that are soon full, whose refusals for load are 529 and 429.
#   anthropic_client.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: anthropic_client.sh BINARY MODEL.gguf}
model=${2:?usage: anthropic_client.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
servers=() urls=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$out"' EXIT

start() {
  local log=$out/${#servers[@]} url=
  "$binary" serve --model "$model" --port 0 --no-management --log-level error "$@" >"$log" &
  servers+=($!)
  for _ in $(seq 600); do
    url=$(grep -o -m1 'http://[^ ]*' "$log" || true)
    [ -n "$url" ] && break
    kill -0 "${servers[-1]}" 2>/dev/null || break
    sleep 0.1
  done
  [ -n "$url" ] || { echo "a server did not say where it listens" >&2; exit 1; }
  urls+=("$url")
}

start
start --target-inflight 1 --max-queue-depth 1
start --target-inflight 1 --max-queue-depth 1 --overload-status 429
"$here/run_anthropic_client.sh" "${urls[@]}"

kill -TERM "${servers[@]}"
for server in "${servers[@]}"; do
  wait "$server" || { echo "a server did not stop cleanly on SIGTERM" >&2; exit 1; }
done
