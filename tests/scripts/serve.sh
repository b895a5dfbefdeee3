# Sourced. serve BINARY ARGUMENT..: starts a server in the background on a free port and waits until it says
# where it listens: $server is its process, $url its address. stop_servers ends all of them and fails when one
# did not end cleanly. What is still running at the end of the script is killed.
serve_logs=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$serve_logs"' EXIT

serve() {
  local binary=$1 log=$serve_logs/${#servers[@]}
  shift
  "$binary" serve "$@" --port 0 --no-management --log-level error >"$log" &
  server=$!
  servers+=("$server")
  url=
  for _ in $(seq 600); do
    url=$(grep -o -m1 'http://[^ ]*' "$log" || true)
    [ -z "$url" ] || return 0
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  echo "a server did not say where it listens" >&2
  return 1
}

stop_servers() {
  local running=("${servers[@]}")
  kill -TERM "${running[@]}"
  servers=()
  for server in "${running[@]}"; do
    wait "$server" || { echo "a server did not stop cleanly on SIGTERM" >&2; return 1; }
  done
}
