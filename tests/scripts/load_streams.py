"""Streaming clients against a running server; every event of every stream is checked.

A stream must open with its first chunk, carry as many tokens as were asked (ignore_eos), name its
finish reason once, report usage that adds up and close with [DONE]. Standard library only.
"""

import argparse
import http.client
import json
import statistics
import sys
import threading
import time


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def one_stream(port, index, n_tokens):
    body = {"prompt": f"Request number {index}: tell me about the number {index * 7919 % 1000}.",
            "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"stream {index}: status {response.status}: {response.read()[:200]!r}")
    times, finishes, usage, done = [], [], None, False
    while line := response.readline().strip() or response.readline().strip():
        if done:
            raise RuntimeError(f"stream {index}: an event after [DONE]")
        if line == b"data: [DONE]":
            done = True
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise RuntimeError(f"stream {index}: {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            times.append(time.perf_counter())
            if choice["finish_reason"]:
                finishes.append(choice["finish_reason"])
    if not done or finishes != ["length"] or usage["completion_tokens"] != n_tokens:
        raise RuntimeError(f"stream {index}: done={done} finish={finishes} usage={usage}")
    return times[0] - start, [b - a for a, b in zip(times, times[1:])], n_tokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    indexes, results, faults = iter(range(args.requests)), [], []
    lock = threading.Lock()

    def client():
        while True:
            with lock:
                index = next(indexes, None)
            if index is None or faults:
                return
            try:
                result = one_stream(args.port, index, args.tokens)
                results.append(result)
            except Exception as fault:  # noqa: BLE001: every fault is reported below
                faults.append(fault)

    start = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(args.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if faults:
        sys.exit(f"{len(faults)} faults, first: {faults[0]}")
    firsts = [first * 1000 for first, _, _ in results]
    gaps = [gap * 1000 for _, gaps, _ in results for gap in gaps]
    tokens = sum(n for _, _, n in results)
    print(f"{len(results)} streams of {args.clients} clients, 0 lost or reordered: "
          f"{tokens / seconds:.0f} tok/s, {len(results) / seconds:.2f} req/s")
    print(f"time to first event ms: p50 {statistics.median(firsts):.1f}  p95 {percentile(firsts, 0.95):.1f}; "
          f"between events ms: p50 {statistics.median(gaps):.2f}  p99 {percentile(gaps, 0.99):.2f}")


if __name__ == "__main__":
    main()
