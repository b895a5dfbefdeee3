# Sourced. serve BINARY ARGUMENT..: starts a server on a free port and waits until its models are loaded: $url is
# its address, $serve_log what it printed. $serve_folder is a folder for the script's files. stop_servers ends all
# servers and fails when one does not end cleanly; what still runs at the end of the script is killed.
serve_folder=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$serve_folder"' EXIT

serve() {
  local binary=$1
  shift
  serve_log=$serve_folder/out.${#servers[@]}
  "$binary" serve --port 0 --log-level error "$@" >"$serve_log" &
  servers+=($!)
  for _ in $(seq 600); do
    url=$(grep -o -m1 'http://[^ ]*' "$serve_log" 2>/dev/null || true)
    if [ -n "$url" ] && curl -sf "$url/ready" >/dev/null; then return 0; fi
    kill -0 "${servers[-1]}" 2>/dev/null || break
    sleep 0.1
  done
  echo "a server did not get ready" >&2
  return 1
}

stop_servers() {
  local running=("${servers[@]}") one
  servers=()
  kill -TERM "${running[@]}"
  for one in "${running[@]}"; do
    wait "$one" || { echo "a server did not stop cleanly on SIGTERM" >&2; return 1; }
  done
}
