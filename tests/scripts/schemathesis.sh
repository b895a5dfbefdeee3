#!/usr/bin/env bash
# Requests made from /openapi.json, sound and faulty ones, against both planes: no fault of the server, no status,
# content type or shape that is not declared. schemathesis.sh BINARY [EXAMPLES per operation]
set -euo pipefail
binary=${1:?usage: schemathesis.sh BINARY [EXAMPLES]}
examples=${2:-10}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/serve.sh"
cat >"$serve_folder/server.toml" <<'TOML'
[models.tiny]
file = "TINY"
TOML
sed -i "s|TINY|$here/../data/models/tiny_llama.gguf|" "$serve_folder/server.toml"
serve "$binary" --config "$serve_folder/server.toml" --threads 1 --management-port 0 \
  --queue-timeout 20 --ctx-size 128
management=$(sed -n 's|^management on ||p' "$serve_log")

venv=$here/../../target/schemathesis
. "$here/venv.sh"
make_venv "$venv" "schemathesis==4.32.5"
checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance
cd "$serve_folder"
run() {
  curl -sf "$1/openapi.json" | python3 "$here/narrow_openapi.py" tiny >"$serve_folder/narrowed.json"
  "$venv/bin/schemathesis" run "$serve_folder/narrowed.json" --url "$1" --checks "$checks" --phases coverage,fuzzing \
    --max-examples "$examples" --workers 1 --request-timeout 30 --seed 1 --no-color --generation-database none "${@:2}"
}
# What is not built says 501 by design.
run "$url" --exclude-path-regex '^/(infill|lora-adapters|slots/|v1/rerank)'
# Names that a list told are tried elsewhere: an unload would end the test.
run "$management" --exclude-path-regex '/unload$'
n_done=$(curl -sf "$url/metrics" | sed -n 's/^tinyloop_requests_total{.*outcome="done".*} //p')
[ "${n_done:-0}" -gt 0 ] || { echo "not one request got as far as the model" >&2; exit 1; }
echo "$n_done requests were answered by the model"
curl -sf "$url/health" >/dev/null || { echo "the server does not live any more" >&2; exit 1; }
stop_servers
