#!/usr/bin/env bash
# Starts a server and runs clients against it that speak OpenAI's API in their own ways: OpenAI's JavaScript
# package, LangChain, and LiteLLM as a proxy in between; then plain requests as LM Studio's documentation has them.
# Each client is installed under target/ once.
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
js=$target/openai-js
make_node "$js" "openai@7.59.0"
cp "$here/openai_client.mjs" "$js/openai_client.mjs" # packages are looked for beside the script
node "$js/openai_client.mjs" "$url"

echo "== LangChain"
make_venv "$target/langchain" "langchain-openai==1.7.4"
"$target/langchain/bin/python" "$here/langchain_client.py" "$url"

echo "== LiteLLM as a proxy"
make_venv "$target/litellm" "litellm[proxy]==1.108.7"
"$target/litellm/bin/python" "$here/litellm_proxy.py" "$url"

echo "== LM Studio's REST routes, as its documentation shows them"
serve "$binary" --model "$model" --management-port 0 --admin-key of-the-operator
python3 "$here/lmstudio_rest.py" "$url" of-the-operator

stop_servers
