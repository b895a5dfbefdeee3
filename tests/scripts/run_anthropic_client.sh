#!/usr/bin/env bash
# Runs anthropic_client.py against servers that are up: run_anthropic_client.sh http://127.0.0.1:8080 [SMALL ..]
# The client lives in a virtual environment under target/, made once.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../target/anthropic-client

. "$here/venv.sh"
make_venv "$venv" "anthropic==2.14.0"
exec "$venv/bin/python" "$here/anthropic_client.py" "$@"
