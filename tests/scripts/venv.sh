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
