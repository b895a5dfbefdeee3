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
stop() { [ -z "$server" ] || { kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; }; server=; }
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
  warm= # after two minutes every worker has had its turn
  warm_at=$(($(date +%s) + 120))
  while [ "$(date +%s)" -lt $end ]; do
    wrk -t1 -c32 -d15s -s "$work/post.lua" "$url/v1/chat/completions" >"$work/wrk"
    "$binary" bench-http "127.0.0.1:$port" --echo --clients 32 --requests 2000 --tokens 32 >/dev/null
    echo "  $(date +%T) $(resident_kb)"
    [ -n "$warm" ] || [ "$(date +%s)" -lt $warm_at ] || warm=$(resident_kb)
  done
  [ -z "$warm" ] || awk -v a="$warm" -v b="$(resident_kb)" \
    'BEGIN { printf "  from the second minute to the end: %d -> %d kB, %+.1f %%\n", a, b, (b / a - 1) * 100 }'
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

# Refusals: how long a client waits for its no (the limit we set ourselves: 10 ms).
refused() { # name, wanted status and code, body, one more wrk option
  cat >"$work/refused.lua" <<LUA
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [[$3]]
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init() n, n_wanted, other = 0, 0, "" end
function response(status, headers, body)
  n = n + 1
  if body:find([[$2]], 1, true) then n_wanted = n_wanted + 1 else other = status .. " " .. body end
end
function done(summary, latency)
  local n, wanted, other = 0, 0, ""
  for _, t in ipairs(threads) do
    n, wanted, other = n + t:get("n"), wanted + t:get("n_wanted"), other .. t:get("other")
  end
  print(string.format("  %-18s %8d refused of %8d  p50 %.2f ms  p99 %.2f ms  longest %.2f ms",
    "$1", wanted, n, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
  if wanted < n or n == 0 then print("  not refused: " .. other) end
end
LUA
  wrk -t1 -c"${4:-8}" -d3s -s "$work/refused.lua" "$url/v1/completions" | grep refused
}

echo "== refusals while the model is busy, 8 connections"
cat >"$work/fake.toml" <<'TOML'
[models.busy]
executor = { max_queue_depth = 2 }
fake = { max_inflight = 1, tick_s = 0.5 }
[models.slow]
fake = { max_inflight = 1, tick_s = 0.05 }
TOML
start --config "$work/fake.toml" --drain-timeout 20
long='"prompt": "abcdefgh", "max_tokens": 8'
hold() { curl -s "$url/v1/completions" -H 'content-type: application/json' -d "$1" >"$work/held" & }
for _ in 1 2 3 4 5 6 7 8 9; do # an objective is judged by what was seen before
  curl -s "$url/v1/completions" -H 'content-type: application/json' -d "{\"model\": \"slow\", $long}" >/dev/null
done
for _ in 1 2 3; do hold '{"model": "busy", "prompt": "abcdefghijklmnopqrstuvwxyzabcdef", "max_tokens": 32}'; done
hold '{"model": "slow", "prompt": "'"$(printf 'a%.0s' $(seq 400))"'", "max_tokens": 400}'
sleep 0.5
refused queue_full '"queue_full"' '{"model": "busy", "prompt": "a", "max_tokens": 8}'
refused slo_unattainable '"slo_unattainable"' "{\"model\": \"slow\", $long, \"slo_ms\": 500}"
refused "never possible" '"context_length_exceeded"' '{"model": "slow", "prompt": "a", "max_tokens": 99999999}'
refused "unknown model" '"model_not_found"' '{"model": "none", "prompt": "a"}'
kill -TERM "$server"
sleep 0.3
refused shutting_down '"shutting_down"' '{"model": "slow", "prompt": "a"}'
kill -TERM "$server"
stop
cat >"$work/fake.toml" <<'TOML'
[server]
http_workers = 1
http_queue_depth = 1
[models.busy.fake]
tick_s = 0.5
TOML
start --config "$work/fake.toml"
for _ in 1 2; do hold '{"prompt": "abcdefghijklmnopqrstuvwxyzabcdef", "max_tokens": 32}'; done
sleep 0.5
refused overloaded '"overloaded"' '{"prompt": "a", "max_tokens": 8}'
stop

echo "== $(basename "$model"), POST /v1/completions, 4 prompt tokens, 1 token out, 32 connections"
start --model "$model"
post 5 /v1/completions '{"prompt": [504, 1, 2, 3], "max_tokens": 1, "temperature": 0}'
echo "== $(basename "$model"), streams"
"$binary" bench-http "127.0.0.1:$port" --clients "${CLIENTS:-16}" --requests "${REQUESTS:-64}"
echo "  resident: $(resident_kb) kB"
