#!/usr/bin/env python3
"""Measure what the tool costs beside the model's calls. Run by hand: python3 .ci/speed.py

Prints each figure with its bound, and exits 1 when one is missed. Machines are noisy: what is compared is run
side by side.
"""
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SYSTEM = '''
import harness
class Fast:
    name, version, mode, model, tools = "fast", "1", "live", "none", []
    prompt, sampling = {"name": "none", "sha256": ""}, {"temperature": 1.0}
    def respond(self, case, trial):
        return harness.Answer({"category": "billing", "needs_human": True},
                              {"seed": 1000 + trial, "temperature": 1.0, "tokens_in": 144, "tokens_out": 24})
fast = Fast()
'''
DELAY_S = 0.05
figures = []


def figure(name, value, bound, unit, at_least=False):
    """Keep a figure, and show it with its bound."""
    met = value >= bound if at_least else value <= bound
    figures.append(met)
    print(f"{name:74} {value:10.2f} {'>=' if at_least else '<='} {bound:<8g} {unit:8} {'ok' if met else 'MISSED'}", flush=True)


def timed(folder, script, *args):
    """Run a script of the project; return its wall time in seconds and its peak memory in MB."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, HERE / script, *map(str, args)], cwd=folder,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{script} {args} ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 1024)


def cost_of_a_trial(folder):
    cases = folder / "one.json"
    cases.write_text(json.dumps({"name": "one", "cases": [{
        "id": "one", "class": "c", "split": "development", "input": "x",
        "expected": {"category": "billing", "needs_human": True}}]}))
    log = folder / "log.jsonl"
    run = ["bench.py", "--system", "fast_system:fast", "--cases", cases, "--log", log, "--trials", 100_000]
    nothing, little = timed(folder, *run, "--budget-s", 0)
    all_of_it, _ = timed(folder, *run)
    figure("a trial beside the call, of 100,000 that answer at once", (all_of_it - nothing) / 0.1, 100, "us")
    again, much = timed(folder, *run)
    figure("resuming a log of 100,000 trials", again - nothing, 2, "s")
    figure("its memory above that of an empty log", much - little, 60, "MB")


class SlowModel(http.server.BaseHTTPRequestHandler):
    """Answers every chat after a fixed delay."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"data": [{"id": "m"}]}'
        if self.command == "POST":
            time.sleep(DELAY_S)
            body = json.dumps({"model": "m", "choices": [{"message": {"content": '{"category": "billing", '
                               '"needs_human": true}'}, "finish_reason": "stop"}]}).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    do_GET = do_POST

    def log_message(self, *args):
        """Quiet."""


def rate_of_workers(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = ["bench.py", "--system", "model_triage:openai=m", "--endpoint", f"http://127.0.0.1:{server.server_port}",
           "--cases", folder / "one.json", "--no-warmup"]
    nothing = timed(folder, *run, "--log", folder / "none.jsonl", "--budget-s", 0)[0]
    rates = {workers: 40 * workers / (timed(folder, *run, "--log", folder / f"w{workers}.jsonl", "--workers", workers,
                                            "--trials", 40 * workers)[0] - nothing) for workers in (1, 4, 8)}
    for workers in (4, 8):
        figure(f"{workers} workers' rate, in per cent of {workers} times the rate of one",
               100 * rates[workers] / (workers * rates[1]), 95, "%", at_least=True)
    server.shutdown()


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fast_system.py").write_text(SYSTEM)
        cost_of_a_trial(folder)
        rate_of_workers(folder)
    return 0 if all(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
