"""LiteLLM's retries, as a proxy between a client that does not retry and our refusals.

    litellm_retries.py http://127.0.0.1:8080

The server is that of retries.sh. What the proxy sends is counted where it arrives: in the server's metrics.
"""

import contextlib
import sys
import threading
import time
import urllib.request

import openai

from litellm_start import Proxy

base = sys.argv[1].rstrip("/")


def deployment(name, key):
    return {
        "model_name": name,
        "litellm_params": {"model": f"openai/{name}", "api_base": f"{base}/v1", "api_key": key, "max_retries": 0},
    }


def count(reason):
    request = urllib.request.Request(base + "/metrics", headers={"authorization": "Bearer free"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("tinyloop_admission_rejected_total{") and f'"{reason}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@contextlib.contextmanager
def held_slot(leave_after=60):
    """A stream on the model with one slot, begun, until the block ends or so many seconds have passed."""
    begun, left = threading.Event(), threading.Event()

    def run():
        client = openai.OpenAI(base_url=base + "/v1", api_key="free", max_retries=2, timeout=60)
        stream = client.completions.create(model="slow", prompt="x", stream=True, max_tokens=4000)
        until = time.monotonic() + leave_after
        for _ in stream:
            begun.set()
            if left.is_set() or time.monotonic() > until:
                break
        stream.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30), "the slot is not held"
    try:
        yield
    finally:
        left.set()
        thread.join()


def run_checks(client):
    def ask(model, **more):
        question = [{"role": "user", "content": "hi"}]
        return client.chat.completions.create(**{"model": model, "messages": question, "max_tokens": 2, **more})

    def expect(status, reason, n_attempts, call):
        before = count(reason)
        try:
            call()
        except openai.APIStatusError as error:
            assert error.status_code == status, error
            assert count(reason) - before == n_attempts, f"{reason}: {count(reason) - before} attempts"
            return
        raise AssertionError(f"no {status}")

    assert ask("tiny").choices
    expect(400, "context_length_exceeded", 1, lambda: ask("tiny", max_tokens=10**6))
    print("ok   what can never fit is sent once")
    with held_slot():
        expect(503, "queue_full", 3, lambda: ask("slow"))
    print("ok   a full queue is tried again, as often as the proxy is told to")
    with held_slot(leave_after=1):
        before = count("queue_full")
        assert ask("slow").choices and count("queue_full") > before
    print("ok   and then it works")
    for name, status in (("nobody", 401), ("none", 404), ("tiny", 400)):
        try:
            ask(name, **({"temperature": 3} if name == "tiny" else {}))
        except openai.APIStatusError as error:
            assert error.status_code == status, error
        else:
            raise AssertionError(f"no {status}")
    print("ok   faults keep their status")


settings = {"num_retries": 2, "disable_cooldowns": True}
models = [deployment(name, "free") for name in ("tiny", "slow", "none")]
models.append(deployment("tiny", "nobody") | {"model_name": "nobody"})
with Proxy(models, settings) as client:
    run_checks(client)
