#!/usr/bin/env bash
# Starts servers on free ports and runs the official anthropic Python client against them: one as it is, and
# two that are soon full, whose refusals for load are 529 and 429.
#   anthropic_client.sh BINARY MODEL.gguf
set -euo pipefail
binary=${1:?usage: anthropic_client.sh BINARY MODEL.gguf}
model=${2:?usage: anthropic_client.sh BINARY MODEL.gguf}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/serve.sh"
urls=()
serve "$binary" --model "$model" --no-management
urls+=("$url")
small=(--model "$model" --no-management --target-inflight 1 --max-queue-depth 1)
serve "$binary" "${small[@]}"
urls+=("$url")
serve "$binary" "${small[@]}" --overload-status 429
urls+=("$url")
"$here/run_anthropic_client.sh" "${urls[@]}"
stop_servers
