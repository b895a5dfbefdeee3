#!/usr/bin/env bash
# The official openai client's retries against refusals of every kind: openai_retries.sh BINARY
# Stand-in models, so nothing is fetched but the client.
set -euo pipefail
binary=${1:?usage: openai_retries.sh BINARY}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/serve.sh"
cat >"$serve_folder/server.toml" <<'TOML'
[keys.free]
key = "free"
[keys.sixty]
key = "sixty"
requests_per_minute = 60
[keys.few]
key = "few"
tokens_per_minute = 3
[models.tiny]
file = "TINY"
[models.slow.fake]
tick_s = 0.1
max_inflight = 1
[models.slow.executor]
max_queue_depth = 0
[models.off.fake]
tick_s = 0.1
[models.off]
enabled = false
TOML
sed -i "s|TINY|$here/../data/models/tiny_llama.gguf|" "$serve_folder/server.toml"
serve "$binary" --config "$serve_folder/server.toml" --no-management

venv=$here/../../target/openai-client
. "$here/venv.sh"
make_venv "$venv" "openai==3.57.0"
"$venv/bin/python" "$here/openai_retries.py" "$url"
stop_servers
