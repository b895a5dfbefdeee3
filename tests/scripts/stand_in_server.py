#!/usr/bin/env python3
"""Stands in for `vllm serve MODEL` and for `llama-server`: their flags, their routes, their wire format.

    stand_in_server.py serve MODEL --port P [--max-num-seqs N ..]     as vLLM
    stand_in_server.py -m FILE --port P [--parallel N ..]             as llama-server

Flags of its own: --start-delay S (answers 503 or refuses until then), --crash-at-start, --tls FILE (certificate
and key).
The text of the prompt says what is answered; `key value` pairs, all optional:

    tokens N      so many words (default 5, at most max_tokens); `tokens endless` until cut
    pause S       seconds between them
    unicode       characters of several bytes, each byte sent by itself
    crash         the process dies after two words
    broken        the connection is reset after two words
    error         an error event after two words
    silent        nothing at all, until cut
    early         the stream ends without an end
    status N      that status instead of an answer
    cached N      prompt tokens that the usage calls cached

GET /stand-in tells what it has seen: {"running", "aborted", "bodies"}.
"""

import json
import os
import select
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

arguments = sys.argv[1:]
is_vllm = arguments[:1] == ["serve"]


def flag(name, default=None):
    return arguments[arguments.index(name) + 1] if name in arguments else default


if "--crash-at-start" in arguments:
    print("stand-in: out of memory", file=sys.stderr, flush=True)
    sys.exit(7)

seats = int(flag("--max-num-seqs", 256)) if is_vllm else int(flag("--parallel", 4))
context = int(flag("--max-model-len", 2048))
model = flag("--served-model-name", "stand-in")
ready_at = time.monotonic() + float(flag("--start-delay", 0))
lock = threading.Lock()
seen = {"running": 0, "aborted": 0, "bodies": []}
queue = threading.Semaphore(seats)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def json(self, status, value, headers=()):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for header in headers:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/stand-in":
            with lock:
                return self.json(200, seen)
        if time.monotonic() < ready_at:
            return self.json(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
        if self.path == "/health":
            return self.json(200, {"status": "ok"})
        if self.path == "/props" and not is_vllm:
            return self.json(200, {"total_slots": seats, "default_generation_settings": {"n_ctx": context}})
        if self.path == "/v1/models":
            return self.json(200, {"object": "list", "data": [{"id": model, "max_model_len": context}]})
        self.json(404, {"error": {"message": "no such route"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            seen["bodies"].append(body)
            is_full = is_vllm and seen["running"] >= seats
            seen["running"] += 1
        try:
            if is_full:
                self.json(503, {"error": {"message": "full", "type": "ServiceUnavailable", "code": 503}})
            elif is_vllm:
                self.answer(body)
            else:  # llama-server never refuses for load
                with queue:
                    self.answer(body)
        except (ConnectionError, BrokenPipeError):
            with lock:
                seen["aborted"] += 1
        finally:
            self.close_connection = True
            with lock:
                seen["running"] -= 1

    def is_gone(self):
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def wait(self, seconds):
        """Sleeps, but for a client that leaves."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            readable, _, _ = select.select([self.connection], [], [], max(0, min(left, 0.05)))
            if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                raise ConnectionError("the client left")
            if left <= 0:
                return

    def send(self, data, by_byte=False):
        pieces = [data[i : i + 1] for i in range(len(data))] if by_byte else [data]
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def embed(self, body):
        """A text becomes (length, -1, 0, 0), cut to `dimensions`; they come back in reverse order."""
        words = body["input"][0].split()
        if words[:1] == ["status"]:
            headers = [("retry-after", "0")] if words[1] in ("429", "502", "503") else []
            return self.json(int(words[1]), {"error": {"message": "as you wish"}}, headers)
        if words[:1] == ["silent"]:
            self.wait(1e9)
        vectors = [[float(len(text)), -1.0, 0.0, 0.0][: body.get("dimensions", 4)] for text in body["input"]]
        data = [{"object": "embedding", "index": i, "embedding": vectors[i]} for i in reversed(range(len(vectors)))]
        n_tokens = sum(len(text.split()) for text in body["input"])
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        self.json(200, {"object": "list", "model": model, "data": data, "usage": usage})

    def answer(self, body):
        if self.path.endswith("/embeddings"):
            return self.embed(body)
        is_chat = self.path.endswith("/chat/completions")
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        words = prompt.split()
        value = lambda name, default: words[words.index(name) + 1] if name in words else default
        if "status" in words:
            headers = [("retry-after", "0")] if value("status", "") in ("429", "502", "503") else []
            return self.json(int(value("status", "")), {"error": {"message": "as you wish"}}, headers)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if "silent" in words:
            self.wait(1e9)
        object_name = "chat.completion.chunk" if is_chat else "text_completion"

        def event(text, finish=None, usage=None, by_byte=False):
            choice = {"index": 0, "logprobs": None, "finish_reason": finish}
            choice.update({"delta": {"content": text} if text else {}} if is_chat else {"text": text})
            if body.get("logprobs") and text:
                entry = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": []}
                choice["logprobs"] = {"content": [entry]}
            chunk = {"id": "x", "object": object_name, "created": 1, "model": model, "choices": [choice]}
            if usage:
                chunk.update({"choices": [], "usage": usage})
                if not is_vllm:
                    chunk["timings"] = {"cache_n": int(value("cached", 0))}
            self.send(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n", by_byte)

        if is_chat:
            self.send(b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n')
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 1 << 30
        wanted = 1 << 30 if value("tokens", "5") == "endless" else int(value("tokens", "5"))
        pieces = ["é", "漢", "😀", "z"] if "unicode" in words else None
        n_sent, finish = 0, "stop" if wanted <= limit else "length"
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        while n_sent < min(wanted, limit):
            if n_sent == 2 and "crash" in words:
                os._exit(9)
            if n_sent == 2 and "broken" in words:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return self.connection.close()
            if n_sent == 2 and "error" in words:
                return self.send(b'data: {"error": {"message": "inside", "code": 500}}\n\n')
            piece = pieces[n_sent % 4] if pieces else f"w{n_sent} "
            if any(stop in piece for stop in stops):
                finish = "stop"
                break
            event(piece, by_byte=bool(pieces))
            n_sent += 1
            self.wait(float(value("pause", "0.001")))
        if "early" in words:
            return self.send(b"")
        event("", finish=finish)
        usage = {"prompt_tokens": len(words), "completion_tokens": n_sent, "total_tokens": len(words) + n_sent}
        if is_vllm:
            usage["prompt_tokens_details"] = {"cached_tokens": int(value("cached", 0))}
        event("", usage=usage)
        self.send(b"data: [DONE]\n\n")
        self.send(b"")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_):
        pass


if is_vllm and "--start-delay" in arguments:
    time.sleep(float(flag("--start-delay")))  # vLLM does not listen before it is ready
server = Server((flag("--host", "127.0.0.1"), int(flag("--port", 8000))), Handler)
if "--tls" in arguments:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(flag("--tls"))
    server.socket = tls.wrap_socket(server.socket, server_side=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(f"stand-in: {' '.join(arguments)}", flush=True)
server.serve_forever()
