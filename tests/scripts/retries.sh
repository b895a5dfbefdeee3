#!/usr/bin/env bash
# The retries of OpenAI's Python and JavaScript clients, of LangChain and of LiteLLM as a proxy, against refusals
# of every kind: retries.sh BINARY
# Stand-in models, so nothing is fetched but the clients. Anthropic's client has its own script.
set -euo pipefail
binary=${1:?usage: retries.sh BINARY}
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

target=$here/../../target
. "$here/venv.sh"
make_venv "$target/openai-client" "openai==3.57.0"
make_venv "$target/langchain" "langchain-openai==1.7.4"
make_venv "$target/litellm" "litellm[proxy]==1.108.7"
make_node "$target/openai-js" "openai@7.59.0"
cp "$here/retries.mjs" "$target/openai-js/retries.mjs" # packages are looked for beside the script
echo "== openai for Python"
"$target/openai-client/bin/python" "$here/retries.py" "$url" openai
echo "== LangChain"
"$target/langchain/bin/python" "$here/retries.py" "$url" langchain
echo "== openai for JavaScript"
node "$target/openai-js/retries.mjs" "$url"
echo "== LiteLLM as a proxy"
"$target/litellm/bin/python" "$here/litellm_retries.py" "$url"
stop_servers
