"""Corpus to tokens: DIR/tokenizer.json, DIR/train.bin, DIR/held_out.bin (u16), DIR/held_out.txt.

    python prepare.py DIR       (after corpus.py DIR)

Documents are runs of paragraphs of about 3,000 characters of one source; 1.5 % of them, drawn with a
fixed seed, are held out and seen by neither the tokenizer nor the training.
"""
import json
import random
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = 0     # also stands before every document
DOCUMENT_CHARACTERS = 3000


def documents(path):
    lines, length = [], 0
    for line in path.read_text().splitlines():
        lines.append(line)
        length += len(line)
        if length > DOCUMENT_CHARACTERS:
            yield "\n".join(lines)
            lines, length = [], 0
    if lines:
        yield "\n".join(lines)


def trained_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def main():
    root = Path(sys.argv[1])
    texts = [text for path in sorted((root / "corpus").glob("*.txt")) for text in documents(path)]
    random.Random(7).shuffle(texts)
    n_held_out = int(len(texts) * 0.015)
    parts = {"held_out": texts[:n_held_out], "train": texts[n_held_out:]}
    tokenizer = trained_tokenizer(parts["train"])
    tokenizer.save(str(root / "tokenizer.json"))
    facts = {}
    for name, part in parts.items():
        ids = [token for encoded in tokenizer.encode_batch(part) for token in [END_OF_TEXT, *encoded.ids]]
        np.array(ids, dtype=np.uint16).tofile(root / f"{name}.bin")
        size = sum(len(text.encode()) for text in part)
        facts[name] = {"documents": len(part), "bytes": size, "tokens": len(ids)}
    (root / "held_out.txt").write_text("\n\n".join(parts["held_out"]) + "\n")
    (root / "data.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(facts)


main()
