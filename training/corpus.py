"""Builds the corpus from the unpacked packages: DIR/corpus/NAME.txt, one paragraph a line.

    python corpus.py DIR        (after fetch.sh DIR)

Every source has one reader that yields paragraphs of plain ASCII prose; README.md says under which
licence each stands. No network; the same packages give the same bytes.
"""
import bz2
import gzip
import json
import lzma
import random
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

PLAIN = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--",
                       "\u2013": "-", "\u2026": "...", "\u00a0": " "})


def plain(text):
    """One line of ASCII: typographic signs spelled out, `_emphasis_` unmarked, spaces collapsed."""
    text = text.translate(PLAIN).replace("``", '"').replace("''", '"')
    text = re.sub(r"_([^_\n]{1,80})_", r"\1", text)
    return re.sub(r"\s+", " ", text).strip().encode("ascii", "ignore").decode()


def paragraphs(text):
    """Blocks between blank lines."""
    return [block for block in map(plain, re.split(r"\n\s*\n", text)) if block]


def share(text, wanted):
    return sum(map(wanted, text)) / max(1, len(text))


def is_prose(text, least=60):
    """Running text: ends like a sentence, nearly all letters and spaces, few capitals."""
    return (len(text) >= least and re.search(r"[.!?][\"')]?$", text) is not None
            and share(text, lambda c: c.isalpha() or c == " ") > 0.93
            and share(text, str.isupper) < 0.15)


def grouped(verses, size=6):
    """Verses joined into paragraphs."""
    return [" ".join(verses[at:at + size]) for at in range(0, len(verses), size)]


def unpacked_r_object(data):
    """One object of an R lazy-load database: length, then a letter for the compression."""
    kind, body = data[4:5], data[5:]
    if kind == b"Z":
        return lzma.decompress(body, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    return bz2.decompress(body) if kind == b"2" else zlib.decompress(data[4:])


def r_character_vectors(base):
    """The strings of every object of an R lazy-load database (`base`.rdx, `base`.rdb)."""
    index = zlib.decompress(base.with_suffix(".rdx").read_bytes(), 47)
    data = base.with_suffix(".rdb").read_bytes()
    # An entry of the index is an integer vector of two: offset and length.
    entry = re.compile(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{8})", re.S)
    for offset, length in sorted({struct.unpack(">ii", m.group(1)) for m in entry.finditer(index)}):
        raw, lines, at = unpacked_r_object(data[offset:offset + length]), [], 0
        for found in re.finditer(rb"\x00[\x00-\x0f]\x00\x09(.{4})", raw, re.S):
            size = struct.unpack(">i", found.group(1))[0]
            if found.start() >= at and 0 <= size < 400:
                at = found.end() + size
                lines.append(raw[found.end():at].decode("latin1"))
        yield lines


def austen(raw):
    root, found = raw / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr", []
    for base in (root / "data/Rdata", root / "R/janeaustenr"):
        for lines in r_character_vectors(base):
            if len(lines) > 5000:
                found += paragraphs("\n".join(lines))
    return [text for text in dict.fromkeys(found) if is_prose(text, 30)]


def kjv(raw):
    printed = subprocess.run(
        [raw / "bible-kjv/usr/bin/bible", "-p", raw / "bible-kjv-text/usr/lib", "-l10000", "gen1:1-rev22:21"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout
    lines = [line for line in printed.splitlines() if re.match(r"^\s*(\w+ ?\d+:)?\d+ ", line)]
    verses = [plain(re.sub(r"^\S*\s*\d*\s*", "", line)) for line in lines]
    return grouped([verse for verse in verses if verse])


def sword_verses(stem):
    """Verses of a compressed SWORD text: .bzz blocks, .bzs their places, .bzv each verse's."""
    blob = stem.with_suffix(".bzz").read_bytes()
    places = struct.iter_unpack("<III", stem.with_suffix(".bzs").read_bytes())
    blocks = [zlib.decompress(blob[start:start + size]) for start, size, _ in places]
    index = stem.with_suffix(".bzv").read_bytes()
    for block, start, size in struct.iter_unpack("<IIH", index[:len(index) // 10 * 10]):
        if size:
            yield blocks[block][start:start + size].decode("utf8", "ignore")


def web(raw):
    root, verses = raw / "sword-text-web/usr/share/sword/modules/texts/ztext/engWEB2015eb", []
    for stem in (root / "ot", root / "nt"):
        for text in sword_verses(stem):
            text = re.sub(r"<(note|title)\b.*?</\1>", " ", text, flags=re.S)
            text = plain(re.sub(r"<[^>]+>", " ", text))
            text = re.sub(r" ([,.;:!?])", r"\1", text)
            text = re.sub(r'(^|\s)" (?=\w)', r'\1"', text)
            if len(text) > 15:
                verses.append(text)
    return grouped(list(dict.fromkeys(verses)))


def classics(raw):
    """Alice, As You Like It, Paradise Lost, lectures; the first chapters of Moby Dick."""
    found = []
    for name in ("alice29", "asyoulik", "plrabn12", "lcet10"):
        is_verse = name in ("asyoulik", "plrabn12")
        text = (raw / f"snappy/testdata/{name}.txt").read_text(encoding="latin1")
        found += [block for block in paragraphs(text) if "Gutenberg" not in block
                  and (is_prose(block, 30) or (is_verse and len(block) > 60))]
    folder = raw / "r-cran-tokenizers/usr/share/doc/r-cran-tokenizers/tests/testthat"
    for path in sorted(folder.glob("moby-ch*.gz")):
        with gzip.open(path, "rt", encoding="utf8") as file:
            found += [block for block in paragraphs(file.read()) if is_prose(block)]
    return found


def jargon(raw):
    path = raw / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz"
    with gzip.open(path, "rt", encoding="latin1") as file:
        text = re.sub(r"\[\d+\]", "", file.read())
    return [block for block in paragraphs(text) if is_prose(block) and "http" not in block]


def sentence(text):
    text = text.strip()
    return (text[0].upper() + text[1:]).rstrip(" ;.,") + ("" if text[-1] in "!?" else ".")


def wordnet(raw):
    """`word: gloss. Example sentences.` of the glosses that carry an example."""
    found = []
    for part in ("noun", "verb", "adj", "adv"):
        path = raw / f"wordnet-base/usr/share/wordnet/data.{part}"
        for line in path.read_text(encoding="latin1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            word = re.sub(r"\(\w+\)", "", line.split()[4]).replace("_", " ")
            gloss = plain(line.split("|", 1)[1])
            examples = [text for text in re.findall(r'"([^"]{12,})"', gloss) if " " in text]
            gloss = re.split(r';? ?"', gloss)[0].strip("; ")
            if gloss and examples:
                lead = "to " if part == "verb" else ""
                found.append(f"{lead}{word}: {gloss}. " + " ".join(map(sentence, examples)))
    random.Random(1).shuffle(found)
    return found


def python_docs(raw):
    """Prose paragraphs; markup resolved to the words it shows."""
    found = []
    root = raw / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.glob("**/*.txt")):
        for block in re.split(r"\n\s*\n", path.read_text(encoding="utf8")):
            if re.match(r"^\s*(\.\.|>>>|:|\+|=|\*\s)", block) or "::" in block or ">>>" in block:
                continue
            block = re.sub(r":[\w:+-]+:`!?~?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", block)
            block = re.sub(r"`+([^`<]*?)(?:\s*<[^`]*>)?`+_*", r"\1", block)
            block = plain(re.sub(r"\*+", "", block))
            if is_prose(block, 200) and "=" not in block and "(" not in block.replace(" (", ""):
                found.append(block)
    return list(dict.fromkeys(found))


SOURCES = {"austen": austen, "classics": classics, "jargon": jargon, "kjv": kjv,
           "python_docs": python_docs, "web": web, "wordnet": wordnet}


def main():
    root = Path(sys.argv[1])
    (root / "corpus").mkdir(exist_ok=True)
    table = {}
    for name, reader in SOURCES.items():
        lines = reader(root / "raw")
        if not lines:
            sys.exit(f"source {name} gave no text: is its package unpacked below {root}/raw?")
        text = "\n".join(lines) + "\n"
        (root / f"corpus/{name}.txt").write_text(text)
        table[name] = {"paragraphs": len(lines), "bytes": len(text)}
        print(f"{name:12} {len(lines):7} paragraphs {len(text):10} bytes", flush=True)
    (root / "corpus/table.json").write_text(json.dumps(table, indent=1) + "\n")


main()
