#!/usr/bin/env bash
# Load against a running server of this build: wrk on /health and on short completions, then
# streaming clients that check every event. Loopback only, bounded in time.
#
#   load.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: load.sh BINARY MODEL.gguf}
model=${2:?usage: load.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
port=${PORT:-18080}
command -v wrk >/dev/null || { echo "wrk is missing: apt-get install wrk" >&2; exit 1; }

log=$(mktemp)
"$binary" serve --model "$model" --port "$port" --management-port 0 --log-level warn >"$log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 200); do
  curl -sf "http://127.0.0.1:$port/ready" >/dev/null && break
  kill -0 $server 2>/dev/null || { cat "$log" >&2; exit 1; }
  sleep 0.05
done

echo "== GET /health, 32 connections, 5 s"
wrk -t1 -c32 -d5s --latency "http://127.0.0.1:$port/health"
echo "== POST /v1/completions, 4 prompt tokens, 1 token out, 32 connections, 5 s"
script=$(mktemp --suffix=.lua)
cat >"$script" <<'LUA'
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"prompt": [504, 1, 2, 3], "max_tokens": 1, "temperature": 0}'
LUA
wrk -t1 -c32 -d5s --latency -s "$script" "http://127.0.0.1:$port/v1/completions"
rm -f "$script"
echo "== streams"
python3 "$here/load_streams.py" "$port" --clients "${CLIENTS:-16}" --requests "${REQUESTS:-64}"
grep VmRSS "/proc/$server/status"
