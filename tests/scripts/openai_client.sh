#!/usr/bin/env bash
# Starts a server on a free port and runs the official openai Python client against it.
#   openai_client.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: openai_client.sh BINARY MODEL.gguf}
model=${2:?usage: openai_client.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/serve.sh"
serve "$binary" --model "$model" --no-management
"$here/run_openai_client.sh" "$url"
stop_servers
