"""Times the same requests against tinyloop and llama-server, in turns, and prints the ratios.

Both servers run the same file with the same number of threads and 8 parallel sequences; only one
works at a time. Prompts are random token ids, new ones each time, so no prefix cache helps either.
Standard library only.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time


class Server:
    def __init__(self, name, command, port, env=None):
        self.name, self.port = name, port
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)

    def wait_ready(self, path):
        while self.process.poll() is None and time.perf_counter() - self.started < 120:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return time.perf_counter() - self.started
            except OSError:
                pass
            time.sleep(0.005)
        sys.exit(f"{self.name} did not start on this machine (exit code {self.process.poll()}); "
                 "its build may need other CPU features: give another with PEER=/path/to/llama-server")

    def complete(self, prompt, n):
        """One request, not streamed. Returns the number of generated tokens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"model": "bench", "prompt": prompt, "max_tokens": n, "temperature": 0,
                "ignore_eos": True, "cache_prompt": False}
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            sys.exit(f"{self.name}: {response.status} {text[:300]!r}")
        return json.loads(text)["usage"]["completion_tokens"]

    def stream(self, prompt, n):
        """One streamed request. Returns (seconds to the first event, [seconds between events])."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"model": "bench", "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True,
                "ignore_eos": True, "cache_prompt": False}
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        times = []
        while line := response.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        gaps = [b - a for a, b in zip(times, times[1:])]
        return times[0] - start, gaps

    def resident_mb(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmRSS"].split()[0]) / 1024, int(lines["VmHWM"].split()[0]) / 1024


def random_prompt(n):
    return [random.randrange(1000, 40000) for _ in range(n)]


def in_parallel(n_clients, work):
    threads = [threading.Thread(target=work) for _ in range(n_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def prompt_rate(server, n=512):
    start = time.perf_counter()
    server.complete(random_prompt(n), 1)
    return n / (time.perf_counter() - start)


def generation_rate(server, n_clients, n=128, n_prompt=16):
    counts = []
    seconds = in_parallel(n_clients, lambda: counts.append(server.complete(random_prompt(n_prompt), n)))
    return sum(counts) / seconds


def deep_rate(server, depth=1024, n=64):
    _, gaps = server.stream(random_prompt(depth), n)
    return 1 / statistics.mean(gaps)


def first_event_ms(server):
    """Median time to the first streamed event with 8 clients at once, 128-token prompts."""
    firsts = []
    in_parallel(8, lambda: firsts.append(server.stream(random_prompt(128), 16)[0] * 1000))
    return statistics.median(firsts)


MEASURES = [
    ("prompt 512, tok/s", prompt_rate, 1),
    ("generate 128, 1 sequence, tok/s", lambda s: generation_rate(s, 1), 1),
    ("generate 128, 8 sequences, tok/s", lambda s: generation_rate(s, 8), 1),
    ("generate 128, 16 clients, tok/s", lambda s: generation_rate(s, 16), 1),
    ("generate 64 at depth 1024, tok/s", deep_rate, 1),
    ("first event p50, 8 clients, ms", first_event_ms, -1),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("model")
    parser.add_argument("--threads", default=str(os.cpu_count()))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    random.seed(1)

    ours = Server("tinyloop", [args.ours, "serve", "--model", args.model, "--port", "18080",
                               "--management-port", "18082", "--threads", args.threads,
                               "--parallel", "8", "--model-name", "bench", "--log-level", "warn"], 18080)
    ready_ours = ours.wait_ready("/ready")
    peer = Server("llama-server", [args.peer, "-m", args.model, "--host", "127.0.0.1", "--port", "18081",
                                   "-np", "8", "-c", "16384", "-t", args.threads, "-ngl", "0"], 18081)
    ready_peer = peer.wait_ready("/health")
    try:
        rows = []
        for name, measure, direction in MEASURES:
            results = {ours.name: [], peer.name: []}
            for server in (ours, peer):
                measure(server)  # warm up
            for _ in range(args.rounds):
                for server in (ours, peer):
                    results[server.name].append(measure(server))
            a, b = (statistics.median(results[s.name]) for s in (ours, peer))
            rows.append((name, a, b, (a / b) ** direction))
        memory_ours, memory_peer = ours.resident_mb(), peer.resident_mb()
        rows.append(("start to ready, s", ready_ours, ready_peer, ready_peer / ready_ours))
        rows.append(("resident memory after this, MB", memory_ours[0], memory_peer[0],
                     memory_peer[0] / memory_ours[0]))
        print(f"\nover HTTP, {args.threads} threads, median of {args.rounds} rounds taken in turns; "
              "advantage > 1 = tinyloop is better")
        print(f"| {'':34} | tinyloop | llama-server | advantage |")
        print(f"| {'-' * 34} | -------- | ------------ | --------- |")
        for name, a, b, ratio in rows:
            print(f"| {name:34} | {a:8.1f} | {b:12.1f} | {ratio:8.2f}x |")
    finally:
        for server in (ours, peer):
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
