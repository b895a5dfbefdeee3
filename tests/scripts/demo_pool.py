"""A pool of models under mixed traffic, with things going wrong on purpose.

Starts a second tinyloop (the remote server) and the pool of --config, sends streamed and whole chats
of several priorities to all models, and meanwhile kills a child process, kills a replica's server,
unloads a model under load and loads it again. Prints what happened and, at the end, how every single
request ended. Fails if one ended without an answer, twice, or with an error that has no name; if memory
was not given back; or if a child outlives its server.
"""

import argparse
import collections
import http.client
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

NAMED = {
    "model_not_loaded", "model_loading", "model_unloading", "model_failed", "queue_full",
    "queue_timeout", "replica_lost", "no_replica", "upstream_error", "upstream_timeout",
    "upstream_overloaded", "overloaded",
}
QUESTIONS = ["Name three rivers.", "What is a pool?", "Count to ten.", "Say something kind."]


class Failure(Exception):
    pass


def call(port, method, path, body=None, timeout=60):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"content-type": "application/json"} if body is not None else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text else None


def wait_until(what, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failure(f"waited in vain for: {what}")
        time.sleep(0.1)


class Traffic:
    """Clients that ask one request after the other, and a book in which each end is written."""

    def __init__(self, port, models, n_clients, started):
        self.port, self.models, self.started = port, models, started
        self.book = collections.Counter()
        self.tokens = collections.Counter()
        self.lock = threading.Lock()
        self.sent = 0
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(n,)) for n in range(n_clients)]
        for thread in self.threads:
            thread.start()

    def client(self, number):
        choose = random.Random(number)
        while not self.stopping.is_set():
            model = choose.choice(self.models)
            end = self.booked(choose, model, choose.choice([4, 12, 30]))
            if end != "finished":
                time.sleep(0.2)  # as a client would that was refused

    def booked(self, choose, model, max_tokens):
        """One request, from its beginning to its end in the book."""
        with self.lock:
            self.sent += 1
        try:
            end, n_tokens = self.one(choose, model, max_tokens)
        except (OSError, http.client.HTTPException, ValueError) as error:
            end, n_tokens = f"NO ANSWER: {error!r}", 0
        with self.lock:
            self.book[model, end] += 1
            self.tokens[model] += n_tokens
        return end

    def burst(self, model, n_requests, max_tokens):
        """So many requests at once; call the result to wait for them and to count their ends."""
        ends = []

        def one(number):
            ends.append(self.booked(random.Random(number), model, max_tokens))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(n_requests)]
        for thread in threads:
            thread.start()

        def counted():
            for thread in threads:
                thread.join(120)
            return collections.Counter(ends)
        return counted

    def one(self, choose, model, max_tokens):
        stream = choose.random() < 0.6
        body = {
            "model": model, "stream": stream, "max_tokens": max_tokens,
            "priority": choose.choice([-1, 0, 0, 5]),
            "messages": [{"role": "user", "content": choose.choice(QUESTIONS)}],
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        connection.request("POST", "/v1/chat/completions", json.dumps(body),
                           {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200 or not stream:
            found = json.loads(answer.read())
            connection.close()
            if answer.status == 200:
                return "finished", found["usage"]["completion_tokens"]
            return self.named(found, answer.status), 0
        return self.events(answer, connection)

    def events(self, answer, connection):
        ends, n_events = [], 0
        for line in answer:
            line = line.decode().strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                ends.append(self.named(event, 200))
            for choice in event.get("choices", []):
                n_events += 1
                if choice.get("finish_reason"):
                    ends.append("finished")
        connection.close()
        if len(ends) != 1:
            return f"ENDED {len(ends)} TIMES", n_events
        return ends[0], n_events

    @staticmethod
    def named(body, status):
        code = body["error"].get("code")
        return code if code in NAMED else f"UNNAMED: {status} {body['error']}"

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(120)
            if thread.is_alive():
                raise Failure("a client still waits for its answer")


class Demo:
    def __init__(self, args):
        self.args = args
        self.started = time.monotonic()
        self.processes = []
        self.port, self.admin_port = 18180, 18181

    def say(self, text):
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    def spawn(self, *arguments):
        log = open(self.args.log, "ab")
        process = subprocess.Popen([self.args.binary, *arguments], stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def remote(self):
        return self.spawn("serve", "-m", self.args.model, "--port", "18190", "--no-management",
                          "--threads", "1", "-c", "2048", "--max-sequences", "4", "--log-level", "warn")

    def admin(self, method, path, body=None):
        return call(self.admin_port, method, "/v1/admin" + path, body)

    def rows(self):
        return {row["name"]: row for row in self.admin("GET", "/models")[1]["data"]}

    def is_up(self, port, path="/ready"):
        try:
            return call(port, "GET", path)[0] == 200
        except OSError:
            return False

    def watch(self, stop):
        """Says each change of a model's state and of its replicas."""
        last = {}
        while not stop.is_set():
            try:
                rows = self.rows()
            except (OSError, http.client.HTTPException):
                return
            for name, row in rows.items():
                now = (row["runtime_state"], row["loaded_replicas"])
                if name in last and last[name] != now:
                    self.say(f"  {name}: {last[name][0]} {last[name][1]} -> {now[0]} {now[1]}"
                             f"/{row['replicas']} replicas")
                last[name] = now
            stop.wait(0.1)

    def tool(self, *arguments):
        done = subprocess.run([self.args.binary, *arguments, "--admin",
                               f"127.0.0.1:{self.admin_port}"], capture_output=True, text=True)
        return (done.stdout + done.stderr).rstrip()

    def descendants(self, pid):
        """Process ids below `pid` and the programs they run."""
        parents, programs = {}, {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    program = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
                except (OSError, IndexError):
                    continue  # it has just ended
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
                    programs[int(entry.name)] = os.path.basename(program)
        found, grew = {pid}, True
        while grew:
            below = {child for child, parent in parents.items() if parent in found}
            grew = not below <= found
            found |= below
        return {child: programs[child] for child in found - {pid}}

    def llama_servers(self, pool):
        below = self.descendants(pool.pid)
        return {pid for pid, program in below.items() if program == "llama-server"}

    def run(self):
        remote = self.remote()
        wait_until("the second tinyloop", lambda: self.is_up(18190))
        pool = self.spawn("serve", "--config", self.args.config, "--log-level", "info")
        wait_until("the pool", lambda: self.is_up(self.admin_port, "/health"))
        settled = ("loaded", "failed")
        wait_until("the models", lambda: all(row["runtime_state"] in settled
                                             for row in self.rows().values()
                                             if row["configured_enabled"]), 300)
        models = [name for name, row in self.rows().items() if row["is_loaded"]]
        print(self.tool("models"), flush=True)
        if len(models) < 2:
            raise Failure("fewer than two models were loaded; see " + str(self.args.log))
        stop = threading.Event()
        watcher = threading.Thread(target=self.watch, args=(stop,))
        watcher.start()
        self.say(f"traffic on {', '.join(models)}: {self.args.clients} clients, streamed and whole, "
                 "three priorities")
        traffic = Traffic(self.port, models, self.args.clients, self.started)
        try:
            self.trouble(pool, remote, models, traffic)
        finally:
            traffic.stop()
            stop.set()
            watcher.join(10)
        self.report(traffic)
        self.end(pool)

    def trouble(self, pool, remote, models, traffic):
        pause = self.args.pause
        time.sleep(pause)
        print(self.tool("top", "--once"), flush=True)
        if "llama" in models:
            before = self.llama_servers(pool)
            self.say(f"killing the llama-server, process {before}")
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            wait_until("a new llama-server", lambda: self.llama_servers(pool) - before)
            self.recovered("llama", 1)
        self.say("killing the second tinyloop, and starting it again")
        remote.kill()
        remote.wait()
        time.sleep(pause)
        self.remote()
        wait_until("the second tinyloop", lambda: self.is_up(18190))
        self.recovered("remote", 1)
        self.unload_under_load(traffic)
        held = self.held("native")
        self.say(f"native holds {held} bytes now")
        if held:
            raise Failure(f"native is unloaded and holds {held} bytes")
        self.say("loading it again, with one replica: " + self.tool(
            "load", "native", "--replicas", "1", "--wait", "--timeout", "120"))
        time.sleep(pause)

    def unload_under_load(self, traffic):
        """With requests in the queue: those must hear that the model is being unloaded."""
        n_requests = 32
        self.say(f"{n_requests} long requests for native, more than it has places for")
        ends = traffic.burst("native", n_requests, 100)
        row = wait_until("requests in native's queue", lambda: next(
            (row for row in [self.rows()["native"]] if row["queue_depth"] >= 4), None))
        self.say(f"unloading native with {row['runtime_inflight']} requests running and "
                 f"{row['queue_depth']} waiting: "
                 + self.tool("unload", "native", "--wait", "--timeout", "60"))
        ends = ends()
        self.say("they ended: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
        if not ends["model_unloading"]:
            raise Failure("no waiting request heard that its model is being unloaded")

    def recovered(self, name, n_replicas):
        def is_back():
            row = self.rows()[name]
            return row["loaded_replicas"] >= n_replicas and row["accepting_new_requests"]
        wait_until(f"{name} to come back", is_back)
        self.say(f"{name} is back")

    def held(self, name):
        devices = self.admin("GET", "/devices")[1]["data"]
        shares = [share for device in devices for share in device["models"]]
        return sum(share["memory"]["estimate_bytes"] for share in shares if share["model"] == name)

    def report(self, traffic):
        print("\nhow every request ended")
        for (model, end), count in sorted(traffic.book.items()):
            print(f"  {model:8} {end:20} {count:5}")
        ended = sum(traffic.book.values())
        tokens = ", ".join(f"{model} {count}" for model, count in sorted(traffic.tokens.items()))
        print(f"{traffic.sent} requests sent, {ended} ended; tokens: {tokens}")
        odd = [end for _, end in traffic.book if end != "finished" and end not in NAMED]
        if odd or ended != traffic.sent:
            raise Failure("not every request ended once, with tokens or a named error: "
                          + "; ".join(odd))
        silent = [model for model in traffic.models if not traffic.book[model, "finished"]]
        if silent:
            raise Failure("nothing finished on " + ", ".join(silent))

    def end(self, pool):
        children = self.descendants(pool.pid)
        self.say("stopping")
        pool.send_signal(signal.SIGTERM)
        code = pool.wait(60)
        left = [pid for pid in children if pathlib.Path(f"/proc/{pid}").exists()]
        self.say(f"the server ended with {code}; child processes left: {len(left)}")
        if code or left:
            raise Failure("the stop was not clean")

    def clean_up(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--config", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=4, help="seconds between two troubles")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("target/demo_pool.log"))
    args = parser.parse_args()
    args.log.write_bytes(b"")
    demo = Demo(args)
    try:
        demo.run()
    except Failure as failure:
        sys.exit(f"demo-pool: {failure} (log: {args.log})")
    finally:
        demo.clean_up()


main()
