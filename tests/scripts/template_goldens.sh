#!/usr/bin/env bash
# Renders the chat templates anew with Jinja2 in Python and compares with what is committed, or writes it.
#   template_goldens.sh [--write]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../target/jinja2
. "$here/venv.sh"
make_venv "$venv" "jinja2==3.1.6"
exec "$venv/bin/python" "$here/make_template_goldens.py" "${1:---check}"
