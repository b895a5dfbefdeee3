"""LiteLLM as a proxy in front of a running tinyloop, asked by the official openai client.

    litellm_proxy.py http://127.0.0.1:8080

Whole answers, streams and errors must survive the way through it, and who leaves must free the place.
"""

import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import openai

# The proxy wants a key that nobody guesses, also on this machine.
key = "sk-" + secrets.token_hex(32)
base = sys.argv[1].rstrip("/")
with urllib.request.urlopen(base + "/v1/models") as listed:
    model = json.load(listed)["data"][0]["id"]
with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]

folder = pathlib.Path(tempfile.mkdtemp())
config = folder / "config.yaml"
config.write_text(
    f"""
model_list:
  - model_name: through-proxy
    litellm_params:
      model: openai/{model}
      api_base: {base}/v1
      api_key: unused
      max_retries: 0
litellm_settings:
  num_retries: 0
  telemetry: false
"""
)
log = (folder / "log").open("w")
proxy = subprocess.Popen(
    [pathlib.Path(sys.executable).parent / "litellm", "--config", config, "--port", str(port), "--host", "127.0.0.1"],
    stdout=log,
    stderr=log,
    env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True", "LITELLM_MASTER_KEY": key},
    start_new_session=True,
)


def wait_until_ready():
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if proxy.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the proxy did not start:\n" + (folder / "log").read_text()[-3000:])


def run_checks():
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=120
    )
    asked = {
        "model": "through-proxy",
        "messages": [{"role": "user", "content": "Tell me about a ship."}],
        "temperature": 0,
        "max_tokens": 16,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    print("ok   whole")

    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    )
    assert text == whole.choices[0].message.content, (text, whole)
    print("ok   stream")

    try:
        client.chat.completions.create(**(asked | {"max_tokens": 10_000_000}))
    except openai.BadRequestError as error:
        assert "context" in str(error).lower(), error
    else:
        raise AssertionError("an impossible request was taken")
    print("ok   errors")


try:
    wait_until_ready()
    run_checks()
finally:
    if proxy.poll() is None:
        os.killpg(proxy.pid, signal.SIGKILL)
