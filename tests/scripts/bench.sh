#!/usr/bin/env bash
# Speed: first this build's engine alone, then the same requests over HTTP to tinyloop and to a
# llama-server, in turns within one run, with the ratio. Pin or quiet the machine yourself; the
# figures are medians over rounds, and only the ratios mean anything on a shared machine.
#
#   bench.sh BINARY MODEL.gguf          PEER=none skips llama-server, PEER=/path/to/llama-server uses yours
set -euo pipefail
binary=${1:?usage: bench.sh BINARY MODEL.gguf}
model=${2:?usage: bench.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
threads=${THREADS:-$(nproc)}

"$binary" bench --model "$model" --threads "$threads"

# What streaming adds to a token: the engine alone and one HTTP client, in turns.
"$binary" serve --model "$model" --threads "$threads" --port 18080 --management-port 0 --log-level error >/dev/null &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
until curl -sf http://127.0.0.1:18080/ready >/dev/null; do kill -0 $server && sleep 0.05; done
for _ in 1 2 3 4 5; do
  "$binary" bench --model "$model" --threads "$threads" -p 0 -n 128 --parallel 1 -r 1 --json
  "$binary" bench-http 127.0.0.1:18080 --clients 1 --requests 1 --tokens 129 --json
done | python3 -c '
import json, statistics, sys
text, reports = sys.stdin.read(), []
while text := text.lstrip():
    report, end = json.JSONDecoder().raw_decode(text)
    reports, text = [*reports, report], text[end:]
engine = [1000 / r["results"][0]["tokens_per_second"] for r in reports if "results" in r]
http = [r["between_events_ms"]["mean"] for r in reports if "results" not in r]
a, b = statistics.median(engine), statistics.median(http)
print(f"\none stream: {a:.2f} ms a token in the engine, {b:.2f} ms between events over HTTP: {b - a:+.2f} ms")'
kill $server; wait $server || true

peer=${PEER:-}
if [ -z "$peer" ]; then
  . "$here/peer.sh"
  peer_of_pip target/peer
fi
[ "$peer" = none ] && exit 0
LD_LIBRARY_PATH=$(dirname "$peer") exec python3 "$here/bench_http.py" "$binary" "$peer" "$model" --threads "$threads"
