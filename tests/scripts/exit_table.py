"""What early exit costs and saves: one Markdown line per fixed depth and per threshold.

    exit_table.py BINARY MODEL TEXT RULE:THRESHOLD,.. [--loops N] [--window TOKENS]

Perplexity and loops per token come from `tinyloop score` on TEXT (held out from the model's training,
or they flatter). Speeds are tokens per second of processor time on one thread, loading included, so
that a busy machine disturbs them little: "scored" in chunks of prompt rows, "generated" by `tinyloop
bench`, one sequence at a time that continues pieces of TEXT. Only their ratios mean anything.
"""

import argparse
import json
import resource
import subprocess

PROMPT, GENERATED, RUNS = 16, 112, 6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("exits", type=lambda text: text.split(","))
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    args = parser.parse_args()

    def run(*words):
        """What it printed, and the seconds of processor time that it took."""
        used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        before = used()
        command = [args.binary, *words, "--model", args.model, "--threads", "1", "--json"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return json.loads(printed), used() - before

    def line(name, loops, exit):
        depth = ["--loops", str(loops), *exit]
        score, seconds = run("score", args.text, "--window", str(args.window), *depth)
        window = min(args.window, score["n_tokens"])
        scored = score["n_tokens"] // window * window / seconds
        _, seconds = run("bench", "-p", "0", "-n", str(GENERATED), "--depth", str(PROMPT - 1),
                         "--parallel", "1", "-r", str(RUNS - 1), "--text", args.text, *depth)
        generated = RUNS * (PROMPT + GENERATED) / seconds
        print(f"| {name} | {score['mean_loops']:.2f} | {score['perplexity']:.2f} "
              f"| {scored:.0f} | {generated:.0f} |", flush=True)

    print("| | loops per token | perplexity | scored tok/s | generated tok/s |")
    print("|---|---|---|---|---|")
    for loops in sorted({1, 2, 3, 4, args.loops}):
        if loops <= args.loops:
            line(f"L = {loops}", loops, [])
    for exit in args.exits:
        line(f"L = {args.loops}, `{exit}`", args.loops, ["--adaptive", exit])


if __name__ == "__main__":
    main()
