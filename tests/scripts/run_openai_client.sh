#!/usr/bin/env bash
# Runs openai_client.py against a server that is up: run_openai_client.sh http://127.0.0.1:8080
# The client lives in a virtual environment under target/, made once.
set -euo pipefail
url=${1:?usage: run_openai_client.sh URL}
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../target/openai-client
wanted="openai==3.57.0"

if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv --clear "$venv" 2>/dev/null || {
    # Debian ships venv apart from python3; virtualenv from pip does the same.
    rm -rf "$venv"
    python3 -m pip install --quiet --disable-pip-version-check --target "$venv-tool" virtualenv
    PYTHONPATH="$venv-tool" python3 -m virtualenv --quiet "$venv"
  }
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted"
  echo "$wanted" >"$venv/installed"
fi
exec "$venv/bin/python" "$here/openai_client.py" "$url"
