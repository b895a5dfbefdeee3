"""What clients in Python do with our refusals: they must try again exactly where we say so.

    retries.py http://127.0.0.1:8080 openai|langchain

The server is that of retries.sh; the client is the official one, or LangChain's class over it. Each attempt is
counted where it leaves the client.
"""

import contextlib
import socket
import sys
import threading
import time

import httpx2 as httpx
import openai
from openai import OpenAI

base = sys.argv[1].rstrip("/")
is_langchain = sys.argv[2] == "langchain"
host, port = base.removeprefix("http://").split(":")
attempts = []


def ask(key, model="tiny", retries=2, transport=None, **more):
    attempts.clear()
    http = httpx.Client(
        transport=transport, event_hooks={"request": [lambda request: attempts.append(time.monotonic())]}
    )
    how = {"base_url": base + "/v1", "api_key": key, "max_retries": retries, "timeout": 60, "http_client": http}
    more.setdefault("max_tokens", 2)
    if is_langchain:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=model, **how, **more).invoke([("user", "hi")]).content
    question = [{"role": "user", "content": "hi"}]
    return OpenAI(**how).chat.completions.create(model=model, messages=question, **more).choices[0].message.content


def expect(status, code, n_attempts, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert error.status_code == status, error
        assert error.code == code, error.code
        assert len(attempts) == n_attempts, f"{status} {code}: {len(attempts)} attempts, not {n_attempts}"
        return error.response.headers
    raise AssertionError(f"no {status}")


def never_again():
    """Faults of the request, and what no retry can mend: one attempt each."""
    expect(400, "invalid_value", 1, lambda: ask("free", temperature=3))
    headers = expect(400, "context_length_exceeded", 1, lambda: ask("free", max_tokens=10**6))
    assert headers["x-should-retry"] == "false"
    expect(401, "invalid_api_key", 1, lambda: ask("nobody"))
    expect(404, "model_not_found", 1, lambda: ask("free", model="none"))
    # A 503 and a 429 that the client would repeat if we did not say that it must not.
    headers = expect(503, "model_not_loaded", 1, lambda: ask("free", model="off"))
    assert headers["x-should-retry"] == "false" and "retry-after" not in headers
    headers = expect(429, "rate_limit_exceeded", 1, lambda: ask("few"))
    assert headers["x-should-retry"] == "false" and "retry-after" not in headers


@contextlib.contextmanager
def held_slot(leave_after=60):
    """A stream on the model with one slot, begun, until the block ends or so many seconds have passed."""
    begun, left = threading.Event(), threading.Event()

    def run():
        body = {"model": "slow", "prompt": "x", "stream": True, "max_tokens": 4000}
        headers = {"authorization": "Bearer free"}
        while not left.is_set():
            with httpx.stream("POST", base + "/v1/completions", json=body, headers=headers, timeout=60) as stream:
                until = time.monotonic() + leave_after
                for _ in stream.iter_raw():
                    if stream.status_code != 200:
                        break  # whoever held it before is just leaving
                    begun.set()
                    if left.is_set() or time.monotonic() > until:
                        return

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30), "the slot is not held"
    try:
        yield
    finally:
        left.set()
        thread.join()


def overload_is_tried_again():
    """A full queue: as often as the client may, at the times that we say; then it works."""
    with held_slot():
        headers = expect(503, "queue_full", 3, lambda: ask("free", model="slow"))
    assert 1 <= int(headers["retry-after"]) <= 30
    gaps = [after - before for before, after in zip(attempts, attempts[1:])]
    assert all(gap >= 0.95 for gap in gaps), f"it waits as long as it is told: {gaps}"
    with held_slot(leave_after=0.5):
        answer = ask("free", model="slow", retries=5)
    assert answer and len(attempts) > 1, len(attempts)


def use_up():
    """Sends what the key may send now; the refusal that ends it says so."""
    headers = {"authorization": "Bearer sixty"}
    body = {"model": "tiny", "text": "x"}
    for _ in range(400):
        answer = httpx.post(base + "/v1/native/tokenize", json=body, headers=headers)
        if answer.status_code == 429:
            break
    assert answer.status_code == 429 and answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert answer.headers["x-ratelimit-limit-requests"] == "60"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def a_rate_limit_says_when():
    """60 requests per minute: one more is refused, and its first retry, when we said, goes through."""
    for _ in range(20):
        use_up()
        assert ask("sixty", retries=1) is not None
        if len(attempts) == 2:
            break  # else a second had passed before the first attempt, and with it came a request
    assert len(attempts) == 2, f"{len(attempts)} attempts"
    assert attempts[1] - attempts[0] >= 0.95


def a_timeout_is_tried_again():
    """A request that does not arrive in time is our 408; the client repeats it."""
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        stalled.settimeout(30)
        raw = b""
        while chunk := stalled.recv(65536):
            raw += chunk
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    status = int(lines[0].split()[1])
    headers = [tuple(line.split(": ", 1)) for line in lines[1:]]
    assert status == 408, lines[0]
    # The client itself never stalls, so it is handed what the server said.
    replay = httpx.MockTransport(lambda request: httpx.Response(status, headers=headers, content=body))
    expect(408, "request_timeout", 3, lambda: ask("free", transport=replay))


for check in [never_again, overload_is_tried_again, a_rate_limit_says_when, a_timeout_is_tried_again]:
    check()
    print(f"ok   {check.__name__}")
