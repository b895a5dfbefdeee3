#!/usr/bin/env bash
# Load against running servers of this build. First a fake model, which answers at once: what HTTP
# and the scheduler cost alone. Then the given model. Loopback only, bounded in time.
#
#   load.sh BINARY MODEL.gguf           SOAK=600 adds that many seconds of load with the memory printed
set -euo pipefail
binary=${1:?usage: load.sh BINARY MODEL.gguf}
model=${2:?usage: load.sh BINARY MODEL.gguf}
port=${PORT:-18080}
url=http://127.0.0.1:$port
command -v wrk >/dev/null || { echo "wrk is missing: apt-get install wrk" >&2; exit 1; }

work=$(mktemp -d)
server=
stop() { [ -z "$server" ] || { kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; }; server=; }
trap 'stop || true; rm -rf "$work"' EXIT

start() { # arguments of serve
  "$binary" serve "$@" --port "$port" --management-port 0 --log-level warn >"$work/log" 2>&1 &
  server=$!
  for _ in $(seq 200); do
    curl -sf "$url/ready" >/dev/null && return
    kill -0 $server 2>/dev/null || break
    sleep 0.05
  done
  cat "$work/log" >&2
  exit 1
}

resident_kb() { awk '/VmRSS/ { print $2 }' "/proc/$server/status"; }
cpu_ticks() { awk '{ print $14 + $15 }' "/proc/$server/stat"; }

post() { # seconds, path, body: wrk with 32 connections, and the processor time of a request
  cat >"$work/post.lua" <<LUA
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [[$3]]
LUA
  local before; before=$(cpu_ticks)
  wrk -t1 -c32 -d"$1s" --latency -s "$work/post.lua" "$url$2" | tee "$work/wrk" |
    grep -E '50%|99%|requests in|Requests/sec|Non-2xx' || true
  local used=$(($(cpu_ticks) - before))
  awk -v used=$used -v hz="$(getconf CLK_TCK)" \
    '/requests in/ { printf "  server: %.1f us of processor time a request\n", used / hz / $1 * 1e6 }' "$work/wrk"
  ! grep -q Non-2xx "$work/wrk"
}

chat='{"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8, "temperature": 0}'

echo "== fake model, GET /health, 32 connections"
cat >"$work/fake.toml" <<'TOML'
[models.fake.fake]
TOML
start --config "$work/fake.toml"
wrk -t1 -c32 -d5s --latency "$url/health" | grep -E '50%|99%|Requests/sec'
echo "== fake model, POST /v1/chat/completions, 8 tokens, not streamed, 32 connections"
post 10 /v1/chat/completions "$chat"
if [ -n "${SOAK:-}" ]; then
  echo "== fake model, $SOAK s of chat completions and streams: resident memory in kB"
  end=$(($(date +%s) + SOAK))
  while [ "$(date +%s)" -lt $end ]; do
    wrk -t1 -c32 -d15s -s "$work/post.lua" "$url/v1/chat/completions" >"$work/wrk"
    "$binary" bench-http "127.0.0.1:$port" --echo --clients 32 --requests 2000 --tokens 32 >/dev/null
    echo "  $(date +%T) $(resident_kb)"
  done
fi
stop

echo "== fake model, 500 streams at once, a token every 50 ms each, every byte compared"
cat >"$work/fake.toml" <<'TOML'
[server]
http_workers = 520
[models.fake.fake]
max_inflight = 512
tick_s = 0.05
TOML
start --config "$work/fake.toml" --max-queue-depth 1000
echo "  resident before: $(resident_kb) kB"
"$binary" bench-http "127.0.0.1:$port" --echo --clients 500 --requests 1000 --tokens 100
echo "  resident after: $(resident_kb) kB"
stop

echo "== $(basename "$model"), POST /v1/completions, 4 prompt tokens, 1 token out, 32 connections"
start --model "$model"
post 5 /v1/completions '{"prompt": [504, 1, 2, 3], "max_tokens": 1, "temperature": 0}'
echo "== $(basename "$model"), streams"
"$binary" bench-http "127.0.0.1:$port" --clients "${CLIENTS:-16}" --requests "${REQUESTS:-64}"
echo "  resident: $(resident_kb) kB"
