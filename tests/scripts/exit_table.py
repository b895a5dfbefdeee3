"""What early exit costs and saves: one Markdown line per threshold.

    exit_table.py BINARY MODEL TEXT RULE THRESHOLD,.. [--loops N] [--threads N]

Perplexity and loops per token come from `tinyloop score` on TEXT (held out from the model's training,
or they flatter); "prompt" is its speed, "generated" that of `tinyloop bench` continuing pieces of the
same text, 1 and 8 at once. The first line is without early exit, the next ones have fixed depths.
Speeds are medians on whatever machine this is: only their ratios mean anything.
"""

import argparse
import json
import subprocess


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("rule", choices=["gate", "kl", "latent"])
    parser.add_argument("thresholds", type=lambda text: text.split(","))
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    threads = ["--threads", str(args.threads)] if args.threads else []

    def run(*words):
        command = [args.binary, *words, "--model", args.model, "--json", *threads]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    def line(name, loops, exit):
        depth = ["--loops", str(loops), "--max-loops", str(max(loops, args.loops)), *exit]
        score = run("score", args.text, "--window", str(args.window), *depth)
        bench = run("bench", "-p", "0", "-n", "96", "--depth", "48", "--parallel", "1,8", "--text",
                    args.text, *depth)
        one, eight = (result["tokens_per_second"] for result in bench["results"])
        print(f"| {name} | {score['mean_loops']:.2f} | {score['perplexity']:.3f} "
              f"| {score['tokens_per_second']:.0f} | {one:.0f} | {eight:.0f} |", flush=True)

    print("| | loops per token | perplexity | prompt tok/s | generated tok/s | 8 at once |")
    print("|---|---|---|---|---|---|")
    line(f"{args.loops} loops", args.loops, [])
    for loops in [2, 4]:
        if loops < args.loops:
            line(f"{loops} loops", loops, [])
    for threshold in args.thresholds:
        line(f"`{args.rule}` < {threshold}" if args.rule != "gate" else f"`gate` {threshold}",
             args.loops, ["--adaptive", f"{args.rule}:{threshold}"])


if __name__ == "__main__":
    main()
