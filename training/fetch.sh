#!/bin/sh
# Fetches the texts of the corpus with apt and unpacks them below DIR/raw. Needs no root and
# installs nothing: packages are only unpacked. Usage: fetch.sh DIR
set -eu
dir=${1:?usage: fetch.sh DIR}
mkdir -p "$dir/packages" "$dir/raw" "$dir/apt/parts" "$dir/apt/lists/partial"
dir=$(cd "$dir" && pwd)
binary="sword-text-web bible-kjv bible-kjv-text r-cran-janeaustenr r-cran-tokenizers wordnet-base
python3.11-doc jargon-text"
cd "$dir/packages"
# shellcheck disable=SC2086 # a list of words
apt-get download $binary
for package in $binary; do
    dpkg -x "${package}"_*.deb "$dir/raw/$package"
done
# The machine's own sources, with the source packages switched on, in a folder of our own.
for list in /etc/apt/sources.list.d/*.sources; do
    if grep -q debian "$list"; then
        sed 's/^Types: deb$/Types: deb-src/' "$list" > "$dir/apt/parts/$(basename "$list")"
    fi
done
sources="-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$dir/apt/parts
-o Dir::State::Lists=$dir/apt/lists"
# shellcheck disable=SC2086 # a list of words
apt-get $sources update -qq && apt-get $sources source --download-only snappy
mkdir -p "$dir/raw/snappy"
tar -xf snappy_*.orig.tar.* -C "$dir/raw/snappy" --strip-components=1
