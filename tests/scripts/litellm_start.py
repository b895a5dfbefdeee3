"""LiteLLM's proxy, started on a free port for as long as a `with` block lasts. Imported by the scripts beside it."""

import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import openai


class Proxy:
    """Serves `models` (entries of LiteLLM's `model_list`); the block gets an openai client that asks it."""

    def __init__(self, models, router_settings):
        # The proxy wants a key that nobody guesses, also on this machine.
        self.key = "sk-" + secrets.token_hex(32)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.folder = pathlib.Path(tempfile.mkdtemp())
        config = {
            "model_list": models,
            "router_settings": router_settings,
            "litellm_settings": {"num_retries": router_settings["num_retries"], "telemetry": False},
        }
        (self.folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    def __enter__(self):
        binary = pathlib.Path(sys.executable).parent / "litellm"
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [binary, "--config", self.folder / "config.yaml", "--port", str(self.port), "--host", "127.0.0.1"],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "NO_DOCS": "True",
                    "LITELLM_MASTER_KEY": self.key,
                },
                start_new_session=True,
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        address = f"http://127.0.0.1:{self.port}"
        return openai.OpenAI(base_url=address, api_key=self.key, max_retries=0, timeout=120)

    def wait_until_ready(self):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/liveliness", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("the proxy did not start:\n" + (self.folder / "log").read_text()[-3000:])

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
