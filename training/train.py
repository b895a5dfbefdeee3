"""Trains the looped model, or with `--baseline` the same parameters never looped.

    python train.py DIR --minutes 70        (looped; ends on the clock)
    python train.py DIR --baseline          (beside it or after it: same data, order, steps, rates; L = 1)

CPU, float32. One seed decides the order of the data and the depths. The rate stays constant for 60 %
of the run and then falls to zero in a straight line; progress is a share of the clock, and the looped
run writes it to DIR/progress.bin for the baseline, which follows it step by step. Depths and the length
of the windows grow with progress: many cheap steps first. DIR/NAME.pt is written every two minutes and taken up
again by the same command.
"""
import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from model import CONFIG, Looped

DEPTHS = np.array([1, 2, 3, 4, 5, 6, 8, 12])
EARLY = np.array([0.13, 0.45, 0.32, 0.10, 0.0, 0.0, 0.0, 0.0])
LATE = np.array([0.03, 0.12, 0.21, 0.30, 0.14, 0.09, 0.07, 0.04])
LAST = np.array([0.02, 0.05, 0.18, 0.34, 0.17, 0.10, 0.09, 0.05])
WARMUP_STEPS, CONSTANT_SHARE, LONG_SHARE = 40, 0.55, 0.6


def rate(step, progress):
    """Factor on the learning rates."""
    falling = min(1.0, (1.0 - progress) / (1.0 - CONSTANT_SHARE))
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.0, falling)


def depth(draw, progress):
    """Loops of a step and how many of them the gradient goes through."""
    late = min(1.0, max(0.0, (progress - 0.25) / 0.5))
    chances, backprop = (1 - late) * EARLY + late * LATE, 2 if late < 0.5 else 3
    if progress >= LONG_SHARE:
        chances, backprop = LAST, 4
    return int(DEPTHS[min(len(DEPTHS) - 1, np.searchsorted(np.cumsum(chances), draw))]), backprop


def length(progress):
    """Tokens of a window: half a context, later a whole one."""
    return CONFIG["context"] // (1 if progress >= LONG_SHARE else 2)


def batches(data, batch, context, seed):
    """Batches of windows of context + 1 tokens without end: shuffled epochs, each at an offset of its
    own. A shorter window is the first or the second half of one, in turn."""
    rng = np.random.default_rng(seed)
    while True:
        offset = rng.integers(0, context)
        order = rng.permutation((len(data) - offset - 1) // context)
        for at in range(0, len(order) - batch + 1, batch):
            starts = offset + order[at:at + batch] * context
            yield torch.from_numpy(np.stack([data[s:s + context + 1] for s in starts]))


def cut(windows, wanted, step):
    whole = windows.shape[1] - 1
    start = 0 if wanted == whole or step % 2 == 0 else whole - wanted
    return windows[:, start:start + wanted + 1]


class Muon:
    """Momentum whose steps on matrices are made orthogonal (Newton-Schulz); Adam for the rest."""

    def __init__(self, model, matrix_rate, adam_rate):
        self.matrix_rate, self.adam_rate = matrix_rate, adam_rate
        named = list(model.named_parameters())
        self.matrices = [p for name, p in named if p.ndim == 2 and name not in ("embed", "adapter")]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        rest = [dict(params=[p for _, p in named if p.ndim == 1], scale=1.0),
                dict(params=[model.embed], scale=1.0), dict(params=[model.adapter], scale=0.1)]
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    @staticmethod
    def orthogonal(stack):
        is_tall = stack.shape[1] > stack.shape[2]
        x = stack.mT if is_tall else stack
        x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
        return x.mT if is_tall else x

    @torch.no_grad()
    def step(self, factor):
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor * group["scale"]
        self.adam.step()
        by_shape = {}
        for p, momentum in zip(self.matrices, self.momentum):
            momentum.lerp_(p.grad, 0.05)
            by_shape.setdefault(p.shape, []).append((p, p.grad.lerp(momentum, 0.95)))
        for shape, pairs in by_shape.items():
            lr = self.matrix_rate * factor
            for (p, _), u in zip(pairs, self.orthogonal(torch.stack([u for _, u in pairs]))):
                p.mul_(1 - lr * 0.02).add_(u, alpha=-lr * max(1.0, shape[0] / shape[1]) ** 0.5)

    def state(self):
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def restore(self, state):
        self.momentum = state["momentum"]
        self.adam.load_state_dict(state["adam"])


@torch.no_grad()
def held_out_loss(model, windows, batch, depths):
    losses = {}
    for loops in depths:
        each = [model.loss(model(w[:, :-1], loops), w[:, 1:].contiguous()).item() for w in windows.split(batch)]
        losses[loops] = round(sum(each) / len(each), 4)
    return losses


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    return parser.parse_args()


def main():
    args = arguments()
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    name, context = "baseline" if args.baseline else "looped", CONFIG["context"]
    data, held_out = (np.fromfile(args.dir / f"{part}.bin", dtype=np.uint16).astype(np.int64)
                      for part in ("train", "held_out"))
    n_windows = (len(held_out) - 1) // context
    windows = torch.from_numpy(np.stack([held_out[s:s + context + 1] for s in
                                         np.linspace(0, n_windows - 1, 12).astype(int) * context]))
    model, checkpoint, step, tokens, started = Looped(), args.dir / f"{name}.pt", 0, 0, time.time()
    optimizer = Muon(model, args.matrix_rate, args.adam_rate)
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.restore(saved["optimizer"])
        step, tokens, started = saved["step"], saved["tokens"], saved["started"]
    stream, draws = batches(data, args.batch, context, 1), np.random.default_rng(2)
    for _ in range(step):
        next(stream), draws.random()
    clock = Progress(args.dir / "progress.bin", step, started, args.minutes, args.baseline)
    log = open(args.dir / f"{name}.jsonl", "a")
    depths = [1] if args.baseline else [1, 4]
    recent, last_log, last_save, last_tokens = {}, time.time(), time.time(), tokens
    while (progress := clock.of(step)) < 1.0:
        loops, backprop = depth(draws.random(), progress)
        if args.baseline:
            loops = backprop = 1
        batch = cut(next(stream), length(progress), step)
        loss = model.loss(model(batch[:, :-1], loops, backprop), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate(step, progress))
        model.zero_grad(set_to_none=True)
        recent.setdefault(loops, []).append(loss.item())
        step, tokens = step + 1, tokens + batch.shape[0] * (batch.shape[1] - 1)
        now = time.time()
        if now - last_log > 30:
            speed = (tokens - last_tokens) / (now - last_log)
            means = {k: round(sum(v) / len(v), 3) for k, v in sorted(recent.items())}
            print(json.dumps({"step": step, "tokens": tokens, "progress": round(progress, 3), "tokens_per_s": round(speed),
                              "loss": means}), file=log, flush=True)
            recent, last_log, last_tokens = {}, now, tokens
        if now - last_save > 120:
            save(checkpoint, model, optimizer, step, tokens, started)
            last_save = time.time()
        if step % 200 == 0:
            losses = held_out_loss(model, windows, args.batch, depths)
            print(json.dumps({"step": step, "held_out": losses}), file=log, flush=True)
            last_log, last_tokens = time.time(), tokens
    save(checkpoint, model, optimizer, step, tokens, started)
    losses = held_out_loss(model, windows, args.batch, [1] if args.baseline else [1, 2, 4, 8, 12])
    print(json.dumps({"step": step, "done": True, "held_out": losses}), file=log, flush=True)


class Progress:
    """Share of the run that is done before a step: the clock's, or for the baseline the one that the
    looped run had before the same step. A value of 1 or more is the end."""

    def __init__(self, path, step, started, minutes, follows):
        self.path, self.started, self.minutes, self.follows = path, started, minutes, follows
        if not follows:
            with open(path, "ab") as file:      # steps after the checkpoint are done again
                file.truncate(4 * step)

    def of(self, step):
        if self.follows:
            while not self.path.exists() or self.path.stat().st_size < 4 * (step + 1):
                time.sleep(0.2)
            return float(np.fromfile(self.path, dtype=np.float32)[step])
        progress = np.float32((time.time() - self.started) / (60 * self.minutes))
        with open(self.path, "ab") as file:
            file.write(progress.tobytes())
        return float(progress)


def save(path, model, optimizer, step, tokens, started):
    beside = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state(), "step": step,
                "tokens": tokens, "started": started}, beside)
    os.replace(beside, path)


if __name__ == "__main__":
    main()
