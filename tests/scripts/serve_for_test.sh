# Sourced. serve_for_test BINARY FOLDER ARGUMENT..: starts a server on a free port, sets $url, and stops the
# server and removes the folder when the script ends.
serve_for_test() {
  local binary=$1 folder=$2
  shift 2
  "$binary" serve --port 0 --log-level warn "$@" >"$folder/out" &
  server=$!
  trap 'kill "$server" 2>/dev/null || true; rm -rf "'"$folder"'"' EXIT
  url=
  for _ in $(seq 600); do
    url=$(grep -o -m1 'http://[^ ]*' "$folder/out" || true)
    [ -n "$url" ] && return
    kill -0 "$server" 2>/dev/null || { echo "the server did not start" >&2; exit 1; }
    sleep 0.1
  done
  echo "the server did not say where it listens" >&2
  exit 1
}
