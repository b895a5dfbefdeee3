"""Times the same embedding requests against tinyloop and llama-server, in turns, and prints the ratios.

    bench_embed.py BINARY LLAMA_SERVER|none MODEL.gguf [--threads N] [--texts N] [--tokens N]

Both servers run the same file with the same number of threads; only one works at a time. Inputs are random
token ids of the given length, new ones each time. Standard library only.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import time

from bench_http import Server


def embed(server, inputs):
    """One request. Returns its seconds."""
    body = json.dumps({"model": "bench", "input": inputs, "encoding_format": "base64"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    start = time.perf_counter()
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        sys.exit(f"{server.name}: {response.status} {text[:300]!r}")
    answer = json.loads(text)
    assert len(answer["data"]) == len(inputs)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("peer")
    parser.add_argument("model")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    servers = [Server("tinyloop", [args.binary, "serve", "--model", args.model, "--model-name", "bench", "--threads",
                                   args.threads, "--port", "18083", "--management-port", "0"], 18083)]
    try:
        servers[0].wait_ready("/ready")
        if args.peer != "none":
            peer = [args.peer, "-m", args.model, "--port", "18084", "--threads", args.threads, "--embeddings",
                    "--pooling", "mean", "--batch-size", "2048", "--ubatch-size", "2048", "--parallel", "16",
                    "--ctx-size", "8192"]
            servers.append(Server("llama-server", peer, 18084))
            servers[1].wait_ready("/health")
        times = {server.name: [] for server in servers}
        for turn in range(args.rounds + 1):
            for server in servers:
                ids = lambda: [random.randrange(1000, 20000) for _ in range(args.tokens)]
                seconds = embed(server, [ids() for _ in range(args.texts)])
                if turn > 0:  # the first round warms up
                    times[server.name].append(seconds)
        rates = {}
        for name, seconds in times.items():
            rates[name] = args.texts / statistics.median(seconds)
            print(f"{name:14} {rates[name]:8.1f} embeddings/s {rates[name] * args.tokens:9.0f} tokens/s")
        if len(rates) == 2:
            print(f"ratio {rates['tinyloop'] / rates['llama-server']:.2f}")
    finally:
        for server in servers:
            server.process.kill()


main()
