"""Reference logits of the GGUF file, computed by the plain PyTorch model: a fixture for the engine.

    python reference.py DIR MODEL.gguf OUT.json

The prompt is the start of a held-out document; logits of a few positions are kept at every 16th
vocabulary entry, which is enough to find any fault in the arithmetic.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch

from weights import load

DEPTHS, POSITIONS, STRIDE, LENGTH = (1, 4, 8), (0, 7, 40, 63), 16, 64


@torch.no_grad()
def main():
    root, gguf, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    held_out = np.fromfile(root / "held_out.bin", dtype=np.uint16).astype(np.int64)
    tokens = held_out[:LENGTH].tolist()         # begins with the document's first token, BOS
    model = load(gguf)
    logits = {}
    for depth in DEPTHS:
        found = model.decode(model(torch.tensor([tokens]), depth))[0]
        logits[str(depth)] = [[float(f"{value:.6g}") for value in found[position, ::STRIDE].tolist()]
                              for position in POSITIONS]
    out.write_text(json.dumps({"note": "written by training/reference.py", "tokens": tokens, "loops": DEPTHS,
                               "positions": POSITIONS, "stride": STRIDE, "logits": logits}) + "\n")


main()
