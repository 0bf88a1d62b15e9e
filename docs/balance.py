#!/usr/bin/env python3
"""Prints how evenly the load lies on simulated CPUs, under Forebay's rules and others, as tables in Markdown.

usage: balance.py FOREBAY [--cpus 8,16,64,128] [--seeds 3] [--jobs 2] [--only LOAD]

A cell has the load of the busiest CPU at the end of the worst phase, in percent of the mean, the longest time until it was within
110 % of what is possible, the number of flows that changed their CPU per second, and the packets reordered; the worst of all seeds, and
the sum of the packets. "possible" is set by the heaviest flow or by polling. The last column counts Forebay's hazardous moves.
"""
import argparse
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

LOADS = {
    "skewed, 64 flows by Zipf's law": ["skewed", "--flows", "64"],
    "skewed, 4,096 flows by Zipf's law": ["skewed", "--flows", "4096"],
    "skewed, 131,072 flows by Zipf's law": ["skewed", "--flows", "131072"],
    "skewed, 1,024 flows for each CPU, the heaviest alike": ["skewed"],
    "heavy-flow": ["heavy-flow"],
    "diurnal": ["diurnal"],
    "aimed": ["aimed"],
}
RULES = ["forebay", "ranges", "kernel", "rss++"]


def simulate(program, load, cpus, seed, rules):
    command = [program, "sim", *load, "--cpus", str(cpus), "--seed", str(seed), "--rules", rules, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def excess(run):
    return run["balanced"]["busiest_percent"] / max(run["balanced"]["possible_percent"], 1)


def cell(runs):
    balanced = [run["balanced"] for run in runs]
    worst = max(runs, key=excess)["balanced"]
    ms = max(it["uneven_ns"] for it in balanced) // 1_000_000
    moves = max(it["wishes_a_second"] for it in balanced)
    reordered = sum(run["reordered"] for run in runs)
    return f"{worst['busiest_percent']:,} %, {ms:,} ms, {moves:,}, {reordered:,}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forebay")
    parser.add_argument("--cpus", default="8,16,64,128")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="loads whose name contains this")
    args = parser.parse_args()
    counts = [int(cpus) for cpus in args.cpus.split(",")]
    total = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, load in LOADS.items():
            if args.only and args.only not in name:
                continue
            print(f"\n| {name} | possible | " + " | ".join(RULES) + " | hazardous |")
            print("|---|---|" + "---|" * len(RULES) + "---|")
            for cpus in counts:
                jobs = {
                    rules: [pool.submit(simulate, args.forebay, load, cpus, seed + 1, rules) for seed in range(args.seeds)]
                    for rules in RULES
                }
                runs = {rules: [job.result() for job in of] for rules, of in jobs.items()}
                ours = runs["forebay"]
                assert all(run["violations"] == 0 for run in ours), f"{name}, {cpus} CPUs: {ours}"
                possible = max(ours, key=excess)["balanced"]["possible_percent"]
                hazardous = sum(run["hazardous"] for run in ours)
                total += hazardous
                cells = [cell(runs[rules]) for rules in RULES]
                print(f"| {cpus} CPUs | {possible:,} % | " + " | ".join(cells) + f" | {hazardous:,} |", flush=True)
    print(f"\n{total:,} hazardous moves under Forebay's rules")


if __name__ == "__main__":
    main()
