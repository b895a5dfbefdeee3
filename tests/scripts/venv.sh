# Sourced. make_venv FOLDER REQUIREMENT: a virtual environment with one package of PyPI, made once.
make_venv() {
  local venv=$1 wanted=$2
  [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ] || return 0
  python3 -m venv --clear "$venv" 2>/dev/null || {
    # Debian ships venv apart from python3; virtualenv from pip does the same.
    rm -rf "$venv"
    python3 -m pip install --quiet --disable-pip-version-check --target "$venv-tool" virtualenv
    PYTHONPATH="$venv-tool" python3 -m virtualenv --quiet "$venv"
  }
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted"
  echo "$wanted" >"$venv/installed"
}

# make_node FOLDER REQUIREMENT: a folder with one package of npm, made once.
make_node() {
  local folder=$1 wanted=$2
  [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ] || return 0
  rm -rf "$folder" && mkdir -p "$folder"
  (cd "$folder" && npm init -y >/dev/null && npm install --silent --no-audit --no-fund "$wanted")
  echo "$wanted" >"$folder/installed"
}
