"""Holds conversations with tau2-bench behind an HTTP endpoint, all in one process.

  python tau2_server.py --port 8701
  bough train ... environment='{type: http, url: "http://127.0.0.1:8701/env", workers: 300}'

A process of `environment.type=python` holds one conversation and needs 0.3 GB; this one shares tasks, data
bases and tools among all conversations.
"""

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tau2_environment import Tau2Environment

IDLE_SECONDS = 3600  # a killed run closes nothing


class Conversations:
    """The open conversations by the name that Bough gives them. Thread-safe: calls of one conversation never
    overlap."""

    def __init__(self):
        self.lock = threading.Lock()
        self.open = {}  # episode -> (environment, time of the last call)

    def answer(self, request):
        try:
            reply = self.call(request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        return reply | ({"id": request["id"]} if "id" in request else {})

    def call(self, request):
        episode, method = request["episode"], request["method"]
        with self.lock:
            environment = self.open.get(episode, (None,))[0]
            if method == "reset":
                self.drop([name for name, (_, at) in self.open.items() if at < time.time() - IDLE_SECONDS])
            if method in ("reset", "close"):
                self.drop([episode])  # a reset may be a retry
            if method == "close":
                return {}
            if method == "reset":
                environment = Tau2Environment()
            if environment is None:
                raise KeyError(f"no conversation {episode!r}; it may have been idle for {IDLE_SECONDS} s")
            self.open[episode] = environment, time.time()
        if method == "reset":
            return environment.reset(request["problem"], request["seed"])
        return environment.step(request["action"])

    def drop(self, names):
        for name in names:
            if name in self.open:
                self.open.pop(name)[0].close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.server.answer(request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Answers requests with answer(request), both JSON."""

    daemon_threads = True
    request_queue_size = 512  # all conversations of a batch may connect at once

    def __init__(self, answer, path, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server_port}/{path}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8701, help="0: a free port")
    with Server(Conversations().answer, "env", parser.parse_args().port) as server:
        print(server.url, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)


if __name__ == "__main__":
    main()
