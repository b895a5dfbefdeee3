"""The built-in engine against llama.cpp's own bench tools, on the same files with the same threads, in turns.

    bench_peer.py TINYLOOP LLAMA_BENCH MODEL.gguf [--threads N] [--rounds R] [--types Q4_1,Q8_0,..] [--json FILE]

LLAMA_BENCH is the path of `llama-bench`; `llama-batched-bench` and `llama-quantize` are looked for beside it.
Every type but the model's own is made from the model by `llama-quantize --allow-requantize`. In each round every test
runs once with either program, the order changing from round to round; reported are the medians and their ratio.
Speeds mean nothing where others use the machine: the share of processor time that was not ours is printed with each.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile

PROMPT, GENERATE, DEEP = 512, 128, 64
DEPTHS = [1024, 4096]
PARALLEL = [8, 16]


def run(command, env=None):
    done = subprocess.run(
        [str(part) for part in command], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


class Tinyloop:
    name = "tinyloop"

    def __init__(self, binary):
        self.binary = binary

    def bench(self, model, threads, *, prompt=0, generate=0, parallel=1, depth=0):
        report = run(
            [self.binary, "bench", "-m", model, "-t", threads, "-p", prompt, "-n", generate]
            + ["--parallel", parallel, "--depth", depth, "-r", 1, "--json"]
        )
        (result,) = json.loads(report)["results"]
        return result["tokens_per_second"]


class Llama:
    name = "llama.cpp"

    def __init__(self, bench):
        self.folder = pathlib.Path(bench).resolve().parent
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(self.folder)}

    def bench(self, model, threads, *, prompt=0, generate=0, parallel=1, depth=0):
        if parallel > 1:
            command = [self.folder / "llama-batched-bench", "-m", model, "-t", threads, "-tb", threads]
            command += ["-c", parallel * (PROMPT + generate), "-npp", 1, "-ntg", generate]
            command += ["-npl", parallel, "--output-format", "jsonl"]
            rows = [line for line in run(command, self.env).splitlines() if line.startswith("{")]
            return json.loads(rows[-1])["speed_tg"]
        command = [self.folder / "llama-bench", "-m", model, "-t", threads, "-p", prompt, "-n", generate]
        rows = json.loads(run(command + ["-d", depth, "-r", 1, "-o", "json"], self.env))
        return rows[-1]["avg_ts"]

    def quantize(self, model, kind, out):
        tool = self.folder / "llama-quantize"
        run([tool, "--allow-requantize", model, out, kind], self.env)


def busy():
    """Processor time of everybody so far, in seconds, and that of our children."""
    user, nice, system = (int(part) for part in pathlib.Path("/proc/stat").read_text().split()[1:4])
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), own.children_user + own.children_system


def tests():
    yield f"prompt of {PROMPT}", {"prompt": PROMPT}
    yield "1 sequence", {"generate": GENERATE}
    for depth in DEPTHS:
        yield f"1 sequence at depth {depth}", {"generate": DEEP, "depth": depth}
    for parallel in PARALLEL:
        yield f"{parallel} sequences", {"generate": DEEP, "parallel": parallel}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tinyloop")
    parser.add_argument("llama_bench")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", default="Q4_0,Q8_0,Q4_K_M")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    ours, theirs = Tinyloop(args.tinyloop), Llama(args.llama_bench)
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if f" {flag}" in flags]
    print(f"{platform.machine()}, {' '.join(known)}, {args.threads} threads, median of {args.rounds} rounds\n")
    print("| file | test | tinyloop tok/s | llama.cpp tok/s | ratio | others' share |")
    print("|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = [("as given", args.model)]
        for kind in filter(None, args.types.split(",")):
            file = pathlib.Path(folder) / f"{kind}.gguf"
            theirs.quantize(args.model, kind, file)
            files.append((kind, file))
        for kind, file in files:
            for name, asked in tests():
                rows.append(compare(args, (ours, theirs), kind, file, name, asked))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def compare(args, programs, kind, file, name, asked):
    speeds = {program.name: [] for program in programs}
    before = busy()
    for round_idx in range(args.rounds):
        turns = programs if round_idx % 2 == 0 else programs[::-1]
        for program in turns:
            speeds[program.name].append(program.bench(file, args.threads, **asked))
    after = busy()
    all_time, own = after[0] - before[0], after[1] - before[1]
    others = max(0.0, 1 - own / all_time) if all_time else 0.0
    mine, peer = (statistics.median(speeds[program.name]) for program in programs)
    print(f"| {kind} | {name} | {mine:.1f} | {peer:.1f} | {mine / peer:.2f} | {others:.0%} |", flush=True)
    return {"file": kind, "test": name, "ratio": mine / peer, "others": others, **speeds}


main()
