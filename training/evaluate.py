"""Perplexity and bits per byte on the held-out text at every depth, as a Markdown table.

    python evaluate.py DIR [--model FILE] [--windows N]

Windows of the model's context without overlap, every position scored. The model is DIR/looped.pt or
--model (a checkpoint or a GGUF file); DIR/baseline.pt is printed beside it when it is there.
"""
import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from model import CONFIG
from weights import load

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


@torch.no_grad()
def losses(model, windows, depths):
    """Mean loss in nats at each depth, and how far the last loop moved the state (relative)."""
    sums, moved = dict.fromkeys(depths, 0.0), dict.fromkeys(depths, 0.0)
    for batch in windows.split(4):
        tokens, targets = batch[:, :-1], batch[:, 1:].contiguous()
        encoded = model.encode(tokens)
        state = encoded
        for loops in range(1, max(depths) + 1):
            before, state = state, model.step(state, encoded)
            if loops in sums:
                logits = model.decode(state).flatten(0, 1)
                sums[loops] += F.cross_entropy(logits, targets.flatten()).item() * len(batch)
                moved[loops] += ((state - before).norm() / state.norm()).item() * len(batch)
    return ({k: v / len(windows) for k, v in sums.items()}, {k: v / len(windows) for k, v in moved.items()})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--windows", type=int, default=1 << 30)
    args = parser.parse_args()
    context = CONFIG["context"]
    facts = json.loads((args.dir / "data.json").read_text())["held_out"]
    bytes_per_token = facts["bytes"] / facts["tokens"]
    tokens = np.fromfile(args.dir / "held_out.bin", dtype=np.uint16).astype(np.int64)
    starts = range(0, len(tokens) - context - 1, context)
    windows = torch.from_numpy(np.stack([tokens[s:s + context + 1] for s in starts]))
    # A subset is drawn evenly over the text.
    windows = windows[np.linspace(0, len(windows) - 1, min(args.windows, len(windows))).astype(int)]
    print(f"{len(windows) * context:,} tokens, {bytes_per_token:.3f} bytes a token\n")
    print("| L | perplexity | bits per byte | state moved |\n| --- | --- | --- | --- |")
    row = lambda name, nats, moved: print(
        f"| {name} | {math.exp(nats):.2f} | {nats / math.log(2) / bytes_per_token:.4f} | {moved} |", flush=True)
    loss, moved = losses(load(args.model or args.dir / "looped.pt"), windows, DEPTHS)
    for depth in DEPTHS:
        row(depth, loss[depth], f"{moved[depth]:.3f}")
    if (args.dir / "baseline.pt").exists():
        row("never looped", losses(load(args.dir / "baseline.pt"), windows, (1,))[0][1], "")


if __name__ == "__main__":
    main()
