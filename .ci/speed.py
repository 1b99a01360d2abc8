#!/usr/bin/env python3
"""Measure what the tool costs beside the model's calls. Run by hand: python3 .ci/speed.py

Prints each figure with its bound in a table, and exits 1 when one is missed. It takes some five minutes and, for a
while, 400 MB in the folder for temporary files. Machines are noisy: what is compared is run side by side.
"""
import http.server
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import harness    # noqa: E402
import report    # noqa: E402

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
WATCH = """
import resource, subprocess, sys, time
began = time.perf_counter()    # in a small process of its own, since a child's peak counts its parent's memory at the start
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
DELAY_S = 0.05
figures = []


def figure(name, value, bound, unit, at_least=False):
    """Keep a figure, and show it with its bound."""
    met = value >= bound if at_least else value <= bound
    figures.append(met)
    print(f"{name:72} {value:10.3g} {'>=' if at_least else '<='} {bound:<8g} {unit:6} {'ok' if met else 'MISSED'}", flush=True)


def timed(folder, script, *args):
    """Run a script of the project; return its wall time in seconds and its peak memory in MB."""
    done = subprocess.run([sys.executable, "-c", WATCH, HERE / script, *map(str, args)], cwd=folder, capture_output=True)
    if done.returncode:
        sys.exit(f"{script} {args} failed: {done.stderr.decode()}")
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak / (2 ** 20 if sys.platform == "darwin" else 1024)


def write_cases(path, count):
    """Write a case set of so many cases."""
    path.write_text(json.dumps({"name": "many", "cases": [
        {"id": f"case-{number}", "class": f"class-{number % 7}", "split": "development", "input": f"message {number}",
         "expected": {"category": "billing", "needs_human": True}} for number in range(count)]}))
    return path


def write_log(folder, name, cases, trials):
    """Write a finished log of the fast system with rows as a server's, and return its path."""
    log, draw = folder / name, random.Random(1)
    timed(folder, "bench.py", "--system", "fast_system:fast", "--cases", cases, "--log", log, "--trials", trials, "--budget-s", 0)
    ids = [case["id"] for case in json.loads(cases.read_text())["cases"]]
    with open(log, "ab") as file:
        for trial in range(trials):
            for case_id in ids:
                latency_s = round(draw.uniform(0.1, 2), 6)
                file.write(harness.encode({
                    "case_id": case_id, "trial": trial, "started_at": "2026-11-30T21:37:46.567+00:00",
                    "output": {"category": draw.choice(["billing", "billing", "delivery"]), "needs_human": draw.random() < 0.7},
                    "metadata": {"session": 0, "seed": 1000 + trial, "temperature": 1.0, "tokens_in": 154,
                                 "tokens_out": 31, "model": "smollm2", "generation_s": round(latency_s / 2, 6),
                                 "stop_reason": "stop"}, "latency_s": latency_s}) + b"\n")
    return log


def a_million_trials(folder):
    cases = write_cases(folder / "many.json", 1000)
    tenth, whole = (write_log(folder, f"{trials}.jsonl", cases, trials) for trials in (100, 1000))
    rows = whole.stat().st_size / 1e6
    given, out = ["--cases", cases], ["--out", folder / "out.json"]
    little, _ = timed(folder, "report.py", tenth, *given, *out)
    much, memory = timed(folder, "report.py", whole, *given, *out)
    figure(f"report.py on 1,000,000 trials of {rows:.0f} bytes", much, 25, "s")
    figure("its memory, of the largest of its processes", memory, 200, "MB")
    figure("its time, in times that on 100,000 trials", much / little, 11, "times")
    seconds, memory = timed(folder, "bench.py", "--system", "fast_system:fast", *given, "--log", whole, "--trials", 1000)
    figure("bench.py resuming 1,000,000 trials", seconds, 15, "s")
    figure("its memory", memory, 150, "MB")
    recording = folder / "recording.json"
    figure("bench.py --convert of 100,000 trials",
           timed(folder, "bench.py", "--log", tenth, *given, "--convert", recording)[0], 10, "s")
    figure("harness.py run on 100,000 trials",
           timed(folder, "harness.py", "run", "--recording", recording, *given, *out)[0], 10, "s")
    whole.unlink()


def the_curve():
    n = 1000
    worst = 0
    for c in (0, 1, 2, 37, 500, 998, 999, 1000):
        for metric, exact in ((report.pass_at_k, lambda k: 1 - Fraction(math.comb(n - c, k), math.comb(n, k))),
                              (report.pass_power_k, lambda k: Fraction(math.comb(c, k), math.comb(n, k)))):
            worst = max(worst, *(abs(value - exact(k)) for k, value in enumerate(metric(n, c), 1)))
    figure("the curve for n = 1000 and all k, away from big-integer arithmetic", float(worst), 1e-12, "")
    began = time.perf_counter()
    report.curve(n, list(range(1, 1001)))
    figure("the curve over 1,000 cases that all differ", time.perf_counter() - began, 1, "s")


def start_up(folder):
    """Side by side, with the bytecode cached, as it is from the second start on."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} \
        | {"PYTHONPYCACHEPREFIX": str(folder / "cache")}
    commands = {"bare": ["-c", "import argparse, json"], "bench.py": [HERE / "bench.py", "--help"],
                "report.py": [HERE / "report.py", "--help"]}
    times = {name: [] for name in commands}
    for _ in range(21):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], env=env, stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - began)
    for name in ("bench.py", "report.py"):
        figure(f"{name} --help, in times python3 -c 'import argparse, json'",
               statistics.median(times[name]) / statistics.median(times["bare"]), 2, "times")


def cost_of_a_trial(folder):
    cases, log = write_cases(folder / "one.json", 1), folder / "log.jsonl"
    run = ["bench.py", "--system", "fast_system:fast", "--cases", cases, "--log", log, "--trials", 100_000]
    nothing, _ = timed(folder, *run, "--budget-s", 0)
    all_of_it, _ = timed(folder, *run)
    figure("a trial beside the call, of 100,000 that answer at once", (all_of_it - nothing) / 0.1, 100, "us")


class Model(http.server.BaseHTTPRequestHandler):
    """Answers every chat after a fixed delay, and in one piece."""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    delay_s = 0

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"data": [{"id": "m"}]}'
        if self.command == "POST":
            time.sleep(self.delay_s)
            body = json.dumps({"model": "m", "choices": [{"message": {"content": '{"category": "billing", '
                               '"needs_human": true}'}, "finish_reason": "stop"}]}).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    do_GET = do_POST

    def log_message(self, *args):
        """Quiet."""


def a_server(delay_s):
    """Return a model's server on a free port, and the command line of a run against it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Delayed", (Model,), {"delay_s": delay_s}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, ["bench.py", "--system", "model_triage:openai=m", "--endpoint", f"http://127.0.0.1:{server.server_port}",
                    "--no-warmup", "--cases"]


def cost_of_a_call(folder):
    """A trial through the client beside a bare loop of the same requests, each in a process of its own, in turn."""
    server, run = a_server(0)
    trials, ratios = 2000, []
    bare = f"""
import http.client, json, socket, sys, time
sys.path.insert(0, {str(HERE)!r})
import model_triage
case = json.load(open({str(folder / "one.json")!r}))["cases"][0]
body = json.dumps(model_triage.openai("m", endpoint="http://x").request(case, 0)).encode()
connection = http.client.HTTPConnection("127.0.0.1", {server.server_port})
connection.connect()
connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
began = time.perf_counter()
for _ in range({trials}):
    connection.request("POST", "/v1/chat/completions", body, {{"Content-Type": "application/json"}})
    connection.getresponse().read()
print(time.perf_counter() - began)
"""
    for turn in range(9):
        loop = float(subprocess.run([sys.executable, "-c", bare], check=True, capture_output=True).stdout)
        nothing, _ = timed(folder, *run, folder / "one.json", "--log", folder / f"a{turn}.jsonl", "--trials", trials, "--budget-s", 0)
        all_of_it, _ = timed(folder, *run, folder / "one.json", "--log", folder / f"b{turn}.jsonl", "--trials", trials)
        ratios.append((all_of_it - nothing) / loop)
    server.shutdown()
    figure("a trial through the client, in times a bare http.client loop's request", statistics.median(ratios), 1.5, "times")


def rate_of_workers(folder):
    server, run = a_server(DELAY_S)
    run.append(folder / "one.json")
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
        the_curve()
        start_up(folder)
        cost_of_a_trial(folder)
        cost_of_a_call(folder)
        rate_of_workers(folder)
        a_million_trials(folder)
    return 0 if all(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
