"""The report of `tinyloop load-depth --json` as a table and a picture.

    load_depth.py REPORT.json PICTURE.png
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

report = json.load(open(sys.argv[1]))
kinds = {"only refuses": [], "may grant fewer loops": []}
for outcome in report["outcomes"]:
    kind = "only refuses" if outcome["min_loops"] is None else "may grant fewer loops"
    kinds[kind].append(outcome)

print(
    f"{report['model']} on {report['backend']}: {report['capacity']:.1f} requests/s at L = {report['asked']} "
    f"with {report['slots']} slots, {report['service_ms']:.0f} ms each; first token wanted within "
    f"{report['slo_ttft_ms']} ms\n{report['requests']} requests a run, medians of {report['seeds']} runs\n"
)
print("| load | server | within the objective | late | refused | mean L granted | tok/s |")
print("|---|---|---|---|---|---|---|")
for pair in zip(*kinds.values()):
    for kind, outcome in zip(kinds, pair):
        print(
            f"| {outcome['load_percent']:.0f} % | {kind} | {outcome['within_slo']:.0%} | {outcome['late']:.0%} "
            f"| {outcome['refused']:.0%} | {outcome['mean_loops']:.1f} | {outcome['tokens_per_second']:.0f} |"
        )

figure, (shares, loops) = pyplot.subplots(1, 2, figsize=(10, 4))
for (kind, outcomes), marker in zip(kinds.items(), "os"):
    load = [outcome["load_percent"] for outcome in outcomes]
    shares.plot(load, [outcome["within_slo"] * 100 for outcome in outcomes], marker=marker, label=kind)
    loops.plot(load, [outcome["mean_loops"] for outcome in outcomes], marker=marker, label=kind)
shares.set(title=f"First token within {report['slo_ttft_ms']} ms", xlabel="load, % of capacity", ylabel="% of all requests")
shares.set_ylim(0, 105)
loops.set(title=f"Loops granted of {report['asked']} asked", xlabel="load, % of capacity", ylabel="mean L")
loops.set_ylim(0, report["asked"] * 1.05)
for axes in (shares, loops):
    axes.grid(alpha=0.3)
    axes.legend()
figure.tight_layout()
figure.savefig(sys.argv[2], dpi=120)
print(f"\npicture: {sys.argv[2]}")
