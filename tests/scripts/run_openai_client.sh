#!/usr/bin/env bash
# Runs openai_client.py and openai_responses.py against a server that is up: run_openai_client.sh http://127.0.0.1:8080
# The client lives in a virtual environment under target/, made once.
set -euo pipefail
url=${1:?usage: run_openai_client.sh URL}
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../target/openai-client

. "$here/venv.sh"
make_venv "$venv" "openai==3.57.0"
"$venv/bin/python" "$here/openai_client.py" "$url"
"$venv/bin/python" "$here/openai_responses.py" "$url"
