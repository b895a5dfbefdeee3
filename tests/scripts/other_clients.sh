#!/usr/bin/env bash
# Starts a server and runs clients against it that speak OpenAI's API in their own ways: OpenAI's JavaScript
# package, LangChain, and LiteLLM as a proxy in between. Each is installed under target/ once.
#   other_clients.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: other_clients.sh BINARY MODEL.gguf}
model=${2:?usage: other_clients.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
target=$here/../../target

. "$here/serve.sh"
. "$here/venv.sh"
serve "$binary" --model "$model" --no-management

echo "== openai for JavaScript"
js=$target/openai-js wanted=openai@7.59.0
if [ "$(cat "$js/installed" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$js" && mkdir -p "$js"
  (cd "$js" && npm init -y >/dev/null && npm install --silent --no-audit --no-fund "$wanted")
  echo "$wanted" >"$js/installed"
fi
cp "$here/openai_client.mjs" "$js/openai_client.mjs" # packages are looked for beside the script
node "$js/openai_client.mjs" "$url"

echo "== LangChain"
make_venv "$target/langchain" "langchain-openai==1.7.4"
"$target/langchain/bin/python" "$here/langchain_client.py" "$url"

echo "== LiteLLM as a proxy"
make_venv "$target/litellm" "litellm[proxy]==1.108.7"
"$target/litellm/bin/python" "$here/litellm_proxy.py" "$url"

stop_servers
