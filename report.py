#!/usr/bin/env python3
"""Read trial logs and run records; say what they show, how sure it is, and whether it is good enough.

    python3 report.py                                       every log in runs/
    python3 report.py recorded/smollm2.jsonl --failures     each trial that failed, with its output and the reason
    python3 report.py --markdown report.md --html report.html
    python3 report.py --require 'pass^3>=0.8' --baseline old-report.json

A metric that the data cannot support is not printed: with any planned trial not run there is no curve.
"""
import argparse
import itertools
import json
import math
import os
import re
import signal
import sys
from array import array
from collections import Counter
from functools import lru_cache
from operator import mul

import bench
import harness
from harness import RunError

REPORT_VERSION = "2"
MARKS = {"pass": "+", "fail": "x", "incomplete": "!", "not run": "."}
OUTCOMES = {"TruncatedReply": "truncated", "UnfinishedReply": "truncated", "EmptyReply": "empty",
            "RefusedReply": "refusal", "ReplyTimeout": "timeout", "ServerError": "server", "ConnectionCut": "server",
            "MalformedReply": "server", "BadRequest": "server", "JSONDecodeError": "schema", "NotRun": "not-run"}
CHECK_OUTCOMES = {"output-fields": "schema", "rejection": "rejection"}
SHOWN_K = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
Z_95 = 1.959963984540054
FEW_LATENCIES = 100
MOST_KEYS = 10_000
MOST_PROCESSES = 8    # some 40 MB each
MOST_CELLS = 20_000    # more are shown as a bar for each case
MOST_EXACT_STEPS = 200_000_000    # some seconds
SIGN_SAMPLES = 9999
MOST_FAILURES = 100    # of a system, in what is pasted
MOST_SHOWN = 500    # characters of an output, on a page and in Markdown


# --- metrics ----------------------------------------------------------------------------------------------

def pass_power_k(n, c):
    """Return, for k = 1 to n, the chance that all k trials drawn without replacement from n, of which c passed,
    pass: C(c, k) / C(n, k), the pass^k of Yao et al. 2024, "tau-bench". (By the ratio from one k to the next.)"""
    chances, chance = [], 1.0
    for drawn in range(c):
        chance *= (c - drawn) / (n - drawn)
        chances.append(chance)
    return chances + [0.0] * (n - c)


def pass_at_k(n, c):
    """Return, for k = 1 to n, the chance that at least one of k trials drawn without replacement from n, of which
    c passed, passes: 1 - C(n-c, k) / C(n, k), equation 1 of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code". (1 - (1 - c/n)^k would be biased.)"""
    return [1 - none_passes for none_passes in pass_power_k(n, n - c)]


@lru_cache
def t_quantile(df):
    """Return Student's t that 95 % of the distribution with `df` degrees of freedom lie within (two-sided).

    Up to 60 degrees by bisection of the finite sums for the distribution (Abramowitz and Stegun 1964, 26.7.3 and
    26.7.4), above by its expansion around the normal quantile (26.7.5); correct to 1e-6 everywhere.
    """
    if df > 60:
        z = Z_95
        return (z + (z**3 + z) / (4 * df) + (5*z**5 + 16*z**3 + 3*z) / (96 * df**2)
                + (3*z**7 + 19*z**5 + 17*z**3 - 15*z) / (384 * df**3)
                + (79*z**9 + 776*z**7 + 1482*z**5 - 1920*z**3 - 945*z) / (92160 * df**4))
    even, low, high = df % 2 == 0, 0.0, 20.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        angle = math.atan(middle / math.sqrt(df))
        total, term = 0.0, 1.0 if even else math.cos(angle)
        for j in range(2 if even else 3, df + 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (j - 1) / j
        total *= math.sin(angle)
        low, high = (middle, high) if (total if even else 2 / math.pi * (angle + total)) < 0.95 else (low, middle)
    return low


def wilson(v, n, z=Z_95):
    """Return Wilson's interval (low, high) for a share `v` of `n`, `n` not necessarily whole (Wilson 1927)."""
    middle, half = v + z * z / (2 * n), z * math.sqrt(v * (1 - v) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def mean_interval(v, variance, m, n):
    """Return the 95 % interval (low, high) for the mean of a rate over cases; None for a single case.

    `v` and `variance` (with m - 1 in the denominator) are of the values of m cases of n trials. The cases are the
    sample: the interval is for the mean over the kind of cases that these were drawn from. It is Wilson's with
    the effective sample size v(1-v)/SE^2, held between m and m x n, in place of the number of trials, and with
    Student's t for m - 1 degrees of freedom in place of 1.96. It says nothing about a kind of case that the set
    does not contain: where one case in ten passes at 0.1 and the rest at 0.99, nine cases often hold none of the
    former, and fewer than 80 % of such intervals cover the truth. No interval can remove that limit.

    Sources: Korn and Graubard 1998 (effective sample size for proportions from clusters); Franco, Little, Louis
    and Slud 2019 (Wilson's formula with it); Miller 2024, "Adding error bars to evals" (cases as clusters).
    """
    if m < 2:
        return None
    if v <= 0 or v >= 1:
        size = m
    else:
        size = min(max(v * (1 - v) * m / variance, m), m * n) if variance > 1e-24 else m * n
    return wilson(min(max(v, 0.0), 1.0), size, t_quantile(m - 1))


def rounded(interval):
    """Return an interval to four places, or None."""
    return interval and [round(end, 4) for end in interval]


def curve(n, passes):
    """Return (values, intervals), each a dict with the keys "1" to "n", from each case's passes of n trials: both
    metrics as means over cases, and their 95 % intervals. Nothing is rounded yet."""
    cases, m = Counter(passes), len(passes)
    values, intervals = {str(k): {} for k in range(1, n + 1)}, {str(k): {} for k in range(1, n + 1)}
    for name, metric in (("pass_at_k", pass_at_k), ("pass_power_k", pass_power_k)):
        counts, by_case = list(cases.values()), [metric(n, c) for c in cases]
        for k, column in enumerate(zip(*by_case), 1):
            mean = math.fsum(map(mul, counts, column)) / m
            away = [value - mean for value in column]
            variance = sum(map(mul, counts, map(mul, away, away))) / max(m - 1, 1)
            values[str(k)][name] = mean
            intervals[str(k)][name] = mean_interval(mean, variance, m, n)
    return values, intervals


def rounded_curve(curve):
    """Return a curve's values, or its intervals, to four places."""
    return {k: {name: rounded(value) if isinstance(value, tuple) else value and round(value, 4)
                for name, value in both.items()} for k, both in curve.items()}


def nearest_rank(ordered, percent):
    """Return the percentile of an ascending sequence by nearest rank: the smallest value that at least `percent`
    per cent of the values do not exceed. None where there are no values."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def ran(counts):
    """Return how many trials of a case ran. (Those that did not are among the incomplete ones.)"""
    return len(counts["marks"]) - counts["not_run"]


def is_flaky(counts):
    """True if, among the trials of a case that ran, some passed and some did not."""
    return 0 < counts["pass"] < ran(counts)


def never_passed(counts):
    """True if a case ran at least once and never passed."""
    return counts["pass"] == 0 < ran(counts)


def cause(verdict, check, error):
    """Return what a trial ended by: the check that it failed, the type of its error, or None for a pass."""
    return check if verdict == "fail" else error["types"][0] if verdict == "incomplete" else None


def outcome_of(verdict, ended_by):
    """Return the one word, of a closed list, for a verdict and its cause."""
    if verdict == "pass":
        return "success"
    return CHECK_OUTCOMES.get(ended_by, "wrong") if verdict == "fail" else OUTCOMES.get(ended_by, "error")


def outcome(result):
    """Return the one word for how a graded trial ended."""
    return outcome_of(result["verdict"], cause(result["verdict"], result["check"], result["error"]))


# --- reading ----------------------------------------------------------------------------------------------

@lru_cache
def loaded(cases_path, task_name):
    """Return (case set, task), read once a process."""
    task = harness.load_task(task_name)
    return harness.load_cases(cases_path, task), task


def runs_of(inputs):
    """Return the inputs as lists of files that are one run each: the logs of a system's shards together, all others
    alone."""
    runs, shards = [], {}
    for path in inputs:
        header = bench.TrialLog(path).header if harness.is_log(path) else {"shard": None}
        if header["shard"] is None:
            runs.append([path])
        elif (name := header["system"]["name"]) in shards:
            shards[name].append(path)
        else:
            runs.append(shards.setdefault(name, [path]))
    return runs


def counted(paths, args):
    """Return (manifest, Tally) of a run's files."""
    if harness.is_log(paths[0]):
        return from_logs(paths, args)
    case_set, _ = loaded(args.cases, args.task)
    manifest, results = from_run_record(paths[0], case_set)
    tally = Tally([case["id"] for case in harness.in_splits(case_set, manifest["splits"])], manifest["trials"])
    for result in results:
        tally.add(result, result["verdict"], result["check"], result["metadata"]["recorded_latency_s"])
    return manifest, tally


def graded_trials(paths, args):
    """Yield each trial of a run's files graded, the planned ones that were not run last."""
    case_set, task = loaded(args.cases, args.task)
    if not harness.is_log(paths[0]):
        yield from from_run_record(paths[0], case_set)[1]
        return
    first, *others = logs = bench.read_shards(paths, case_set, args.regrade)
    cases = {case["id"]: case for case in harness.in_splits(case_set, first.header["splits"])}
    for log in logs:
        for row in log.rows():
            yield harness.graded(cases[row["case_id"]], row, log.header["run_id"], task.checks)
    for case, trial in harness.plan(case_set, first.header["splits"], first.header["trials"]):
        if not first.holds(case["id"], trial):    # nor do the others, which share what they hold
            yield harness.graded(case, harness.not_run(case["id"], trial), first.header["run_id"], task.checks)


def from_logs(paths, args):
    """Return (manifest, Tally) of a log, or of the logs of shards, counted a stretch at a time and side by side. Raises
    RunError for a log that is not of the case set, and for a trial that is logged twice."""
    case_set, task = loaded(args.cases, args.task)
    logs = bench.read_shards(paths, case_set, args.regrade)
    for log in logs:
        harness.of_task(log.header["task"], task, log.path, args.regrade)
    header, digest, spans = logs[0].header, harness.TrialDigest(logs[0].header["trials"]), {}
    tally = Tally([case["id"] for case in harness.in_splits(case_set, header["splits"])], header["trials"])
    parts = [(log, stretch) for log in logs for stretch in bench.stretches(log.path)]
    large = sum(os.path.getsize(log.path) for log in logs) > bench.STRETCH    # a process takes a while to start
    counted = side_by_side(count_stretch, [(log.path, log.header, stretch, args.cases, args.task, args.regrade)
                                           for log, stretch in parts], MOST_PROCESSES if large else 1)
    for (log, _), (part, part_digest, sessions, part_spans) in zip(parts, counted):
        tally.merge(part)
        digest.merge(part_digest)
        for place, span in part_spans.items():
            number = len(log.sessions) - 1 + place
            spans[log, number] = wider(spans.get((log, number), span), *span)
        log.sessions += sessions[1:]
    try:
        all_missing = tally.missing()
    except RunError:
        for log in bench.read_shards(paths, case_set, args.regrade):    # one after the other, which names the line
            for _ in log.rows():
                pass
        raise
    for missing in all_missing:
        row = harness.not_run(*missing)
        digest.add(row)
        tally.add(row, "incomplete", None, None)
    sessions = [session for log in logs for session in bench.sessions_of(log)]
    manifest = harness.manifest(header | {"sessions": sessions, "regraded_from": logs[0].regraded_from}, case_set, task,
                                digest.hexdigest())
    # Shards may run at the same time on many machines: their sessions' times do not add up to one.
    wall_s = None if header["shard"] else round(sum(ended - began for began, ended in spans.values()), 3)
    return manifest | {"wall_s": wall_s}, tally


def count_stretch(path, header, stretch, cases_path, task_name, regrade):
    """Return (Tally, TrialDigest, sessions, spans) of a stretch of the log with this header, graded row by row on the way. The first
    session is the one that goes on; `spans` maps a session's place to (when its first trial began, when its last
    ended)."""
    case_set, task = loaded(cases_path, task_name)
    log = bench.read_log(path, case_set, regrade, stretch=stretch)
    if log.header != header:
        raise RunError(f"{path} was replaced while it was read; report it again")
    cases = {case["id"]: case for case in harness.in_splits(case_set, log.header["splits"])}
    tally, digest, spans = Tally(list(cases), log.header["trials"]), harness.TrialDigest(log.header["trials"]), {}
    for row in log.rows():
        began, place = log.began, len(log.sessions) - 1
        spans[place] = wider(spans.get(place, (began, began)), began, began + row["latency_s"])
        digest.add(harness.recorded(row))
        verdict, check, _ = harness.grade(cases[row["case_id"]], row["trial"], row, task.checks)
        tally.add(row, verdict, check, row["latency_s"])
    return tally, digest, log.sessions, spans


def wider(span, began, ended):
    """Return a span of time, (began, ended), that holds another too."""
    return min(span[0], began), max(span[1], ended)


def side_by_side(function, tasks, most):
    """Yield function(*task) of each task, in order, from as many processes as there are cores, or `most`. (Not from the
    library's pools: of these one waits for ever for a process that was killed, the other leaves its own behind when it
    is.)"""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(len(tasks), cores, most)
    if count < 2:
        yield from itertools.starmap(function, tasks)
        return
    import multiprocessing
    workers, pipes = [], []
    try:
        for first in range(count):
            pipe, far_end = multiprocessing.Pipe(duplex=False)
            pipes.append(pipe)
            worker = multiprocessing.Process(
                target=send_each, args=(far_end, pipes, function, tasks[first::count]), daemon=True)
            worker.start()
            workers.append(worker)
            far_end.close()    # so that the process alone holds it, and its death is an end of file here
        for place in range(len(tasks)):
            result = pipes[place % count].recv()
            if isinstance(result, RunError):
                raise result
            yield result
    except EOFError:
        raise RunError("a process that counted trials was ended by the system (out of memory?); try again") from None
    except OSError as error:
        raise RunError(f"the log cannot be counted in {count} processes: {error.strerror}") from None
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for pipe in pipes:
            pipe.close()


def send_each(pipe, inherited, function, tasks):
    """What a process of `side_by_side` does: send what the function returns or the RunError that it raises."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C, which reaches it too, ends it without a word
    for other in inherited:    # the report alone reads: when it has ended, sending fails
        other.close()
    for task in tasks:
        try:
            result = function(*task)
        except RunError as error:
            result = error
        try:
            pipe.send(result)
        except OSError:    # the report has ended
            return


def from_run_record(path, case_set):
    """Return (manifest, results) of a run record. Raises RunError where it is none, or of another case set."""
    record = harness.read_json(path)
    try:
        manifest, results = record["manifest"], record["results"]
        faults = (harness.plan_fault(manifest), *map(bench.session_fault, manifest["sessions"]),
                  harness.kind_fault(manifest["task"], {"name": str, "sha256": str}),
                  harness.kind_fault(manifest, {"regraded_from": (str, type(None)), "recording_sha256": str}))
        if fault := next(filter(None, faults), None):
            raise RunError(f"{path}: its manifest: {fault}")
        harness.of_case_set({"case_set_sha256": manifest["case_set"]["sha256"],
                             "inputs_sha256": manifest["case_set"]["inputs_sha256"]}, case_set, path)
        case_ids = {case["id"] for case in harness.in_splits(case_set, manifest["splits"])}
        faults = (harness.result_fault(result, case_ids, manifest["trials"]) for result in results)
        if fault := next((f"result {number}: {fault}" for number, fault in enumerate(faults, 1) if fault), None):
            raise RunError(f"{path}: {fault}")
        seen = {(result["case_id"], result["trial"]) for result in results}
        if not len(seen) == len(results) == len(case_ids) * manifest["trials"]:
            raise RunError(f"{path} does not hold each planned trial of {case_set['file']} once")
        needed = ("run_id", "system", "task", "trials", "splits", "sessions", "regraded_from", "recording_sha256")
        return {key: manifest[key] for key in needed}, results
    except (TypeError, LookupError, AttributeError):
        raise RunError(f"{path} is not a run record (`harness.py run` writes one), nor a trial log") from None


# --- one system -------------------------------------------------------------------------------------------

class Tally:
    """What is kept of graded trials: counts and, as they came, some 60 bytes of each, but no rows."""
    keys = {}    # of outputs, in this process

    def __init__(self, case_ids, trials):
        """`case_ids` and `trials` are the plan's."""
        self.case_ids, self.trials = case_ids, trials
        self.places = {case_id: place for place, case_id in enumerate(case_ids)}
        self.cases, self.numbers, self.marks = array("i"), array("i"), bytearray()    # the places of the cases
        self.outputs, self.latencies = array("Q"), array("d")    # below 0: no output
        self.ends = Counter()    # (place of the case, verdict, cause) -> trials
        self.named, self.usage = set(), Usage()

    def add(self, trial, verdict, check, latency_s):
        """Count one graded trial, given as a log's row or a run record's result."""
        place, metadata, error = self.places[trial["case_id"]], trial["metadata"], trial.get("error")
        ended_by = cause(verdict, check, error)
        self.ends[place, verdict, ended_by] += 1
        self.cases.append(place)
        self.numbers.append(trial["trial"])
        self.marks.append(ord(MARKS["not run" if ended_by == "NotRun" else verdict]))
        self.outputs.append(self.key_of(trial["output"]) if error is None else 0)
        self.latencies.append(latency_s if error is None else -1)
        self.usage.add(metadata, verdict == "pass")
        model, server = metadata.get("model"), metadata.get("server")
        self.named.add((model if isinstance(model, str) else None, server if isinstance(server, str) else None))

    def key_of(self, output):
        """Return 64 bits of the digest of an output's canonical JSON; few outputs are new, and others are looked up."""
        text = repr(output)
        if text not in self.keys:
            if len(self.keys) >= MOST_KEYS:
                self.keys.clear()
            self.keys[text] = int(harness.sha256_json(output)[:16], 16)
        return self.keys[text]

    def merge(self, other):
        """Count the trials of another tally of the same plan."""
        for name in ("cases", "numbers", "marks", "outputs", "latencies"):
            getattr(self, name).extend(getattr(other, name))
        self.ends.update(other.ends)
        self.named |= other.named
        self.usage.merge(other.usage)

    def missing(self):
        """Return an iterator over (case id, trial) of the planned trials that were not counted. Raises RunError where one
        was counted twice."""
        counted = [bytearray(self.trials) for _ in self.case_ids]
        for place, trial in zip(self.cases, self.numbers):
            if counted[place][trial]:
                raise RunError(f"case {self.case_ids[place]}, trial {trial} is logged twice; the logs were left as they are")
            counted[place][trial] = 1
        return ((case_id, trial) for case_id, of_case in zip(self.case_ids, counted)
                for trial, is_counted in enumerate(of_case) if not is_counted)

    def causes(self, verdict):
        """Return what the trials of one verdict ended by, most often first."""
        causes = Counter()
        for (_, ended, ended_by), count in self.ends.items():
            if ended == verdict:
                causes[ended_by] += count
        return dict(causes.most_common())

    def per_case(self, cases):
        """Return each case's part of the report."""
        marks = [bytearray(MARKS["not run"] * self.trials, "ascii") for _ in cases]
        outputs, latencies = [array("Q") for _ in cases], [array("d") for _ in cases]
        for place, trial, mark, output, latency_s in zip(self.cases, self.numbers, self.marks, self.outputs, self.latencies):
            marks[place][trial] = mark
            if latency_s >= 0:
                outputs[place].append(output)
                latencies[place].append(latency_s)
        outcomes = [Counter() for _ in cases]
        for (place, *end), count in self.ends.items():
            outcomes[place][outcome_of(*end)] += count
        return {case["id"]: {
            "class": case["class"], "critical": case.get("critical", False), **counts_of(marks[place].decode()),
            "outputs": len(latencies[place]), "distinct_outputs": len(set(outputs[place])),
            "p95_s": nearest_rank(sorted(latencies[place]), 95), "outcomes": dict(outcomes[place].most_common())}
            for place, case in enumerate(cases)}


def summarize(source, manifest, tally, case_set, prices=(None, None)):
    """Return (a system's part of the report, its latencies in ascending order) from the Tally of its trials. `source`
    names the file they come from."""
    trials, cases = manifest["trials"], harness.in_splits(case_set, manifest["splits"])
    per_case = tally.per_case(cases)
    not_run = sum(counts["not_run"] for counts in per_case.values())
    values, intervals = (None, None) if not_run else curve(trials, [counts["pass"] for counts in per_case.values()])
    columns = None if not_run else [sum(column) for column in zip(*(
        [mark == MARKS["pass"] for mark in counts["marks"]] for counts in per_case.values()))]
    ordered = sorted(latency_s for latency_s in tally.latencies if latency_s >= 0)
    latencies_s = {"trials": len(ordered)} | {name: nearest_rank(ordered, percent) for name, percent in (
        ("median", 50), ("p90", 90), ("p95", 95))}
    verdicts = {verdict: sum(counts[verdict] for counts in per_case.values()) for verdict in harness.VERDICTS}
    replies = {name: sorted({pair[place] for pair in tally.named if pair[place]})
               for place, name in enumerate(("models", "servers"))}
    mixed = what_mixes(manifest["sessions"], replies)
    return {
        "system": manifest["system"], "source": source, "run_id": manifest["run_id"],
        "recording_sha256": manifest["recording_sha256"], "task": manifest["task"],
        "regraded_from": manifest["regraded_from"], "sessions": manifest["sessions"],
        "named_in_replies": replies, "mixed": mixed,
        "trials_per_case": trials, "cases": len(cases), "verdicts": verdicts, "not_run": not_run,
        "failures_by_check": tally.causes("fail"), "incomplete_by_error": tally.causes("incomplete"),
        "outcomes": outcomes_by_group(per_case), "per_case": per_case,
        "flaky_cases": [case_id for case_id, counts in per_case.items() if is_flaky(counts)],
        "never_passed": [case_id for case_id, counts in per_case.items() if never_passed(counts)],
        "curve": values and rounded_curve(values), "curve_interval_95": intervals and rounded_curve(intervals),
        "one_trial": columns and {"passed_cases": columns, "min": min(columns), "max": max(columns)},
        "latency_s": latencies_s, "wall_s": manifest.get("wall_s"),
        "usage": tally.usage.summary(trials, *prices),
        "notes": notes(manifest, replies, mixed, per_case, latencies_s),
    }, ordered


def counts_of(marks):
    """Return a case's counts (not-run trials among the incomplete ones), its marks in order of trial, and its pass
    rate among the trials that ran with its 95 % Wilson interval."""
    not_run, passed = marks.count(MARKS["not run"]), marks.count(MARKS["pass"])
    runs = len(marks) - not_run
    return {"pass": passed, "fail": marks.count(MARKS["fail"]),
            "incomplete": marks.count(MARKS["incomplete"]) + not_run, "not_run": not_run, "marks": marks,
            "pass_rate": round(passed / runs, 4) if runs else None,
            "interval_95": rounded(wilson(passed / runs, runs)) if runs else None}


def outcomes_by_group(per_case):
    """Return the outcomes over all cases, over each class, and over the critical cases."""
    groups = {"all": Counter(), "by_class": {}, "critical": Counter()}
    for counts in per_case.values():
        of_class = groups["by_class"].setdefault(counts["class"], Counter())
        for group in (groups["all"], of_class, *([groups["critical"]] if counts["critical"] else [])):
            group.update(counts["outcomes"])
    return groups


def what_mixes(sessions, replies):
    """Return what differs within a log, as a dict of lists: between its sessions, or between the models and servers
    that its replies name."""
    values = {key: [session[key] for session in sessions] for key in ("server", "endpoint", "workers")}
    values |= {key: [session["environment"].get(key) for session in sessions]
               for key in ("python", "platform", "hardware")}
    values |= {f"{name} in replies": found for name, found in replies.items()}
    distinct = {key: sorted({str(value) for value in found if value is not None}) for key, found in values.items()}
    return {key: found for key, found in distinct.items() if len(found) > 1}


class Usage:
    """Tokens and generation time over trials. A count that a server did not give is missing, never zero."""

    def __init__(self):
        # (tokens in counted?, tokens out counted?) -> trials, passed trials, tokens in, tokens out
        self.sums = {(way_in, way_out): [0, 0, 0, 0] for way_in in (False, True) for way_out in (False, True)}
        self.timed = [0, 0]    # tokens out, and the seconds that they took

    def add(self, metadata, passed):
        """Add one trial's metadata."""
        tokens_in, tokens_out = metadata.get("tokens_in"), metadata.get("tokens_out")
        counted = sane(tokens_in, int), sane(tokens_out, int)
        sums = self.sums[counted]
        sums[0] += 1
        sums[1] += passed
        if counted[0]:
            sums[2] += tokens_in
        if counted[1]:
            sums[3] += tokens_out
            if sane(metadata.get("generation_s"), int, float) and metadata["generation_s"] > 1e-6:
                self.timed[0] += tokens_out
                self.timed[1] += metadata["generation_s"]

    def merge(self, other):
        """Add the trials of another."""
        for counted, sums in other.sums.items():
            self.sums[counted] = [a + b for a, b in zip(self.sums[counted], sums)]
        self.timed = [a + b for a, b in zip(self.timed, other.timed)]

    def summary(self, trials_per_case, price_in, price_out):
        """Return tokens, their rate, and, with both prices (per million tokens), the cost, over the trials that
        were counted both ways: of one, of as many as a case has, and of all for each that passed."""
        trials, passed, tokens_in, tokens_out = self.sums[True, True]
        trials_in, trials_out = trials + self.sums[True, False][0], trials + self.sums[False, True][0]
        summary = {"tokens_in": tokens_in + self.sums[True, False][2] if trials_in else None,
                   "tokens_out": tokens_out + self.sums[False, True][3] if trials_out else None,
                   "trials_counted": {"in": trials_in, "out": trials_out}, "trials_counted_both": trials,
                   "tokens_per_s": round(self.timed[0] / self.timed[1], 2) if self.timed[1] else None}
        if price_in is not None:
            cost = (tokens_in * price_in + tokens_out * price_out) / 1e6
            summary["cost"] = {"per_trial": cost / trials, "per_case": cost / trials * trials_per_case,
                               "per_passed_trial": cost / passed if passed else None} if trials else None
        return summary


def sane(value, *kinds):
    """True if what a server measured is a number of these types that can be added up."""
    return type(value) in kinds and 0 <= value < 1e12


def notes(manifest, replies, mixed, per_case, latency_s):
    """Return what a reader must know before trusting the numbers, a sentence each."""
    found = []
    if manifest["regraded_from"]:
        found.append(f"made from case set {manifest['regraded_from'][:12]}, whose inputs are the same, and graded anew "
                     "with today's answers")
    made_with = {session["task"]["sha256"] for session in manifest["sessions"]}
    if made_with - {manifest["task"]["sha256"]}:
        names = sorted({session["task"]["name"] for session in manifest["sessions"]})
        found.append(f"the task has changed since this log was made (with {', '.join(names)}); it is graded by "
                     f"{manifest['task']['name']} as it is now")
    found += [f"this log mixes {key}: {harness.some(values)}; its trials may not be alike"
              for key, values in mixed.items()]
    asked = re.sub("@[0-9a-f]{12}$", "", manifest["system"]["model"])    # without the digest that Ollama's models have
    if others := [model for model in replies["models"] if model != asked]:
        found.append(f"replies name the model {harness.some(others)}, where {asked} was asked for")
    ran_twice = [counts for counts in per_case.values() if counts["outputs"] > 1]
    temperature = manifest["system"]["sampling"].get("temperature")
    if isinstance(temperature, (int, float)) and temperature > 0 and ran_twice \
            and all(counts["distinct_outputs"] == 1 for counts in ran_twice):
        found.append(f"all trials of every case returned the same output at temperature {temperature}: the server "
                     "may ignore the seed or the temperature, or answer from a cache; ask it twice with different seeds")
    if 0 < latency_s["trials"] < FEW_LATENCIES:
        found.append(f"with {latency_s['trials']} latencies, their p95 is close to their maximum")
    return found


# --- comparing --------------------------------------------------------------------------------------------

def compare(a, b):
    """Return the comparison of two systems' parts of the report, b against a, on the cases that they share.

    It answers two questions. `on_these_cases`: is b better on exactly these cases, or is the difference a matter
    of which trials were drawn? `on_cases_like_these`: would it be better on other cases of the same kind?
    """
    pair = {"a": a["system"]["name"], "b": b["system"]["name"], "sources": [a["source"], b["source"]]}
    if a["task"]["sha256"] != b["task"]["sha256"]:
        return pair | {"refused": "they were graded by different tasks"}
    if list(a["per_case"]) != list(b["per_case"]):
        return pair | {"refused": "they ran different cases"}
    if a["not_run"] or b["not_run"]:
        return pair | {"refused": f"{a['not_run'] + b['not_run']} planned trials were not run"}
    n_a, n_b = a["trials_per_case"], b["trials_per_case"]
    passes = [(counts["pass"], b["per_case"][case_id]["pass"]) for case_id, counts in a["per_case"].items()]
    differences = [passed_b * n_a - passed_a * n_b for passed_a, passed_b in passes]    # in units of 1 / (n_a n_b)
    m, unit = len(passes), n_a * n_b
    mean = sum(differences) / m
    interval = None
    if len(set(differences)) > 1:    # else there is no spread between cases to judge by
        half = t_quantile(m - 1) * math.sqrt(sum((one - mean) ** 2 for one in differences) / (m - 1) / m)
        interval = rounded((max(-1.0, (mean - half) / unit), min(1.0, (mean + half) / unit)))
    told = [f"trials per case differ: {n_a} and {n_b}"] if n_a != n_b else []
    told += [f"sampling differs: {line}" for line in bench.differences(
        "sampling", a["system"]["sampling"], b["system"]["sampling"], "in a", "in b")]
    return pair | {
        "difference": round(mean / unit, 4), "better": sum(one > 0 for one in differences),
        "worse": sum(one < 0 for one in differences), "equal": differences.count(0),
        "on_these_cases": {"question": "is b better than a on exactly these cases?",
                           **trial_p_value(passes, n_a, n_b)},
        "on_cases_like_these": {"question": "would b be better than a on other cases of this kind?",
                                "interval_95": interval, **sign_flip_p_value(differences)},
        "notes": told,
    }


def trial_p_value(passes, n_a, n_b):
    """Return the two-sided p-value that the trials within each case are exchangeable between two systems.

    In each case, given the passes of both together, b's share of them is hypergeometric; the total's null
    distribution is the convolution over cases, and p is the chance of a total at least as far from its
    expectation as the one seen. Where that would take too long (many thousand trials, where the total is as good
    as normal) a normal distribution of the same mean and variance stands in, and `method` says so.
    """
    both = Counter(passed_a + passed_b for passed_a, passed_b in passes if 0 < passed_a + passed_b < n_a + n_b)
    observed = sum(passed_b for passed_a, passed_b in passes if 0 < passed_a + passed_b < n_a + n_b)
    n = n_a + n_b
    mean = math.fsum(count * s * n_b / n for s, count in both.items())
    variance = math.fsum(count * s * (n - s) * n_a * n_b / (n * n * (n - 1)) for s, count in both.items())
    distance = abs(observed - mean)
    cases = sum(both.values())
    if cases * min(n_a, n_b) * min(cases * min(n_a, n_b), 80 * math.sqrt(variance)) > MOST_EXACT_STEPS:
        p = math.erfc(max(0.0, distance - 0.5) / math.sqrt(2 * variance))
        return {"p": p, "method": "normal approximation of the trials within cases"}
    low, chances = 0, [1.0]
    for s, count in both.items():
        first, last = max(0, s - n_a), min(s, n_b)
        whole = math.comb(n, s)
        case = [math.comb(n_b, drawn) * math.comb(n_a, s - drawn) / whole for drawn in range(first, last + 1)]
        case_low, case = trimmed(first, case)
        for _ in range(count):
            longer = [0.0] * (len(chances) + len(case) - 1)
            for i, drawn in enumerate(case):
                longer[i:i + len(chances)] = [sum_ + drawn * chance for sum_, chance in zip(longer[i:], chances)]
            low, chances = trimmed(low + case_low, longer)
    p = math.fsum(chance for total, chance in enumerate(chances, low) if abs(total - mean) >= distance - 1e-9)
    return {"p": min(1.0, p), "method": "exact, over the trials within cases"}


def trimmed(low, chances):
    """Return a distribution (its lowest value, the chances from there up) without ends that are below 1e-300."""
    first = next((i for i, chance in enumerate(chances) if chance > 1e-300), 0)
    last = next((i for i in range(len(chances) - 1, -1, -1) if chances[i] > 1e-300), 0)
    return low + first, chances[first:last + 1]


def sign_flip_p_value(differences):
    """Return the two-sided p-value that each case's difference is as likely to have the other sign: over every
    pattern of signs up to 16 cases that differ, over a sample with a fixed seed above."""
    differing = [one for one in differences if one]
    observed = abs(sum(differing))
    if len(differing) <= 16:
        totals = [0]
        for one in differing:
            totals = [total + sign for total in totals for sign in (one, -one)]
        return {"p": sum(abs(total) >= observed for total in totals) / len(totals),
                "method": "exact, over the signs of the cases"}
    import random
    draw, hits = random.Random(len(differing)), 1
    for _ in range(SIGN_SAMPLES):
        signs = draw.getrandbits(len(differing))
        hits += abs(sum(one if signs >> i & 1 else -one for i, one in enumerate(differing))) >= observed
    return {"p": hits / (SIGN_SAMPLES + 1), "method": f"{SIGN_SAMPLES} drawn patterns of the signs of the cases"}


# --- deciding ---------------------------------------------------------------------------------------------

RULE = re.compile(r"(?:(pass[@^])([1-9][0-9]*)|(incomplete|not_run|flaky))(?:\[(.+)\])?|p95_s")
COMPARE = {">=": float.__ge__, "<=": float.__le__, ">": float.__gt__, "<": float.__lt__, "==": float.__eq__}


def rule(text):
    """An argparse type: a rule such as pass^3>=0.8, pass@1[billing]>0.9, flaky<=2 or p95_s<3."""
    found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|==|>|<)\s*([0-9.eE+-]+)\s*", text)
    if not (found and RULE.fullmatch(found[1])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not METRIC>=NUMBER (or <=, >, <, ==) with METRIC pass@K, pass^K, incomplete, not_run, flaky, "
            "each with a [class] if wanted, or p95_s")
    if found[1].startswith("pass") and not 0 <= float(found[3]) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a chance lies between 0 and 1")
    return text.strip(), found[1], found[2], float(found[3])


def decide(wanted, system, lower_bound):
    """Return the decision on one rule for one system: its value, whether it is met, and the cases behind it."""
    text, metric, sign, bound = wanted
    kind, k, counted, of_class = RULE.fullmatch(metric).groups()
    cases = {case_id: counts for case_id, counts in system["per_case"].items() if of_class in (None, counts["class"])}
    missing = sum(counts["not_run"] for counts in cases.values())
    value, why, behind = None, None, []
    if not cases:
        why = f"there is no case of the class {of_class}"
    elif missing and counted not in ("incomplete", "not_run"):
        why = f"{missing} planned trials were not run"
    elif counted:
        each = {case_id: is_flaky(counts) if counted == "flaky" else counts[counted] for case_id, counts in cases.items()}
        behind, value = [case_id for case_id, count in each.items() if count], sum(each.values())
    elif not kind:
        value = system["latency_s"]["p95"]
        behind = [case_id for case_id, counts in cases.items()
                  if counts["p95_s"] is not None and not COMPARE[sign](counts["p95_s"], bound)]
        why = None if value is not None else "no trial returned an output"
    else:
        behind = [case_id for case_id, counts in cases.items()
                  if (counts["pass"] > 0 if sign.startswith("<") else counts["pass"] < len(counts["marks"]))]
        if int(k) > system["trials_per_case"]:
            why = f"{k} trials of each case are needed, and there are {system['trials_per_case']}"
        else:
            values, intervals = curve(system["trials_per_case"], [counts["pass"] for counts in cases.values()])
            name = "pass_at_k" if kind == "pass@" else "pass_power_k"
            value = values[k][name]
            if lower_bound:
                interval = intervals[k][name]
                value, why = (interval[0], None) if interval else (None, "a single case has no interval over cases")
    met = value is not None and COMPARE[sign](round(float(value), 12), bound)    # 1 - 0.8 is 0.2 here
    return {"rule": text + (" (lower bound)" if lower_bound and kind else ""), "system": system["system"]["name"],
            "source": system["source"], "value": value, "met": met, "why": why, "cases": behind}


def against_baseline(system, baseline, path):
    """Return the decision whether a system has become worse than it was in an older report.

    It has if its mean pass rate on the same cases has dropped and the test over trials says p < 0.05. Raises
    RunError where the older report is of another case set, or does not hold the system.
    """
    try:
        older = [one for one in baseline["systems"] if one["system"]["name"] == system["system"]["name"]]
        if baseline["case_set"]["sha256"] != system["case_set_sha256"]:
            raise RunError(f"{path} is of another case set; make it anew from its log (--regrade, if answers changed)")
        if not older:
            raise RunError(f"{path} has no system {system['system']['name']}")
        older = next((one for one in older if not one["not_run"]), older[-1])    # a whole one, where there is one
        if baseline["report_version"] != REPORT_VERSION or older["trials_per_case"] < 1 or any(
                (counts["marks"].count(MARKS["pass"]), len(counts["marks"])) != (counts["pass"], older["trials_per_case"])
                for counts in older["per_case"].values()):
            raise TypeError
        compared = compare(older, system)
        behind = [case_id for case_id, counts in system["per_case"].items() if counts["pass"] * older["trials_per_case"]
                  < older["per_case"].get(case_id, counts)["pass"] * system["trials_per_case"]]
    except (TypeError, LookupError, AttributeError):
        raise RunError(f"{path} is not a report of this version ({REPORT_VERSION})") from None
    rates = [sum(counts["pass"] for counts in one["per_case"].values()) / one["trials_per_case"] for one in (older, system)]
    met = "refused" not in compared and not (rates[1] < rates[0] and compared["on_these_cases"]["p"] < 0.05)
    return {"rule": f"not significantly worse than in {os.path.basename(path)}", "system": system["system"]["name"],
            "source": system["source"], "value": compared.get("difference"),
            "p": compared.get("on_these_cases", {}).get("p"), "met": met,
            "method": compared.get("on_these_cases", {}).get("method"),
            "why": compared.get("refused") or "; ".join(compared["notes"]) or None, "cases": behind}


# --- for the terminal -------------------------------------------------------------------------------------

def percent(interval):
    """Return an interval as text."""
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "no interval"


def colored(marks):
    """Return marks with a terminal's colours."""
    colors = {MARKS["pass"]: "32", MARKS["fail"]: "31", MARKS["incomplete"]: "33", MARKS["not run"]: "2"}
    return re.sub(r"(.)\1*", lambda run: f"\x1b[{colors[run[1]]}m{run[0]}\x1b[0m", marks)


def headline(system):
    """Yield the lines on a whole system: counts, what to know before trusting them, failures by cause."""
    verdicts = system["verdicts"]
    yield f"{verdicts['pass']} pass, {verdicts['fail']} fail, {verdicts['incomplete']} incomplete" \
          + (f" ({system['not_run']} of them not run)" if system["not_run"] else "")
    yield from (f"note: {note}" for note in system["notes"])
    for title, key in (("failed at", "failures_by_check"), ("incomplete by", "incomplete_by_error")):
        if system[key]:
            yield f"{title}: " + words(system[key])


CURVE_HEAD = ("k", "pass@k", "95 % interval", "pass^k", "95 % interval")


def shown_k(system):
    """Return the values of k, as keys of a curve, that are shown."""
    return [str(k) for k in SHOWN_K if k < system["trials_per_case"]] + [str(system["trials_per_case"])]


def curve_rows(system):
    """Return the rows of a table of both curves with their intervals."""
    values, intervals = system["curve"], system["curve_interval_95"]
    return [(k, *(cell for name in ("pass_at_k", "pass_power_k")
                  for cell in (f"{values[k][name]:.4f}", percent(intervals[k][name])))) for k in shown_k(system)]


def curve_lines(system):
    """Yield the lines of both curves with their intervals."""
    shown = shown_k(system)
    yield "k       " + " ".join(k.rjust(6) for k in shown)
    for title, name in (("pass@k", "pass_at_k"), ("pass^k", "pass_power_k")):
        yield f"{title:8}" + " ".join(f"{system['curve'][k][name]:.4f}".rjust(6) for k in shown)
        for end, place in (("  from", 0), ("  to", 1)):
            intervals = [system["curve_interval_95"][k][name] for k in shown]
            if intervals[0]:
                yield f"{end:8}" + " ".join(f"{interval[place]:.4f}".rjust(6) for interval in intervals)


def outcome_rows(system):
    """Return (name, outcomes as text) of all cases, of each class, and of the critical cases."""
    outcomes = system["outcomes"]
    groups = {"all cases": outcomes["all"]} | {f"class {name}": counts for name, counts in outcomes["by_class"].items()}
    groups |= {"critical cases": outcomes["critical"]} if outcomes["critical"] else {}
    return [(name, words(counts)) for name, counts in groups.items()]


def outcome_lines(system):
    """Return the lines of outcomes."""
    (_, overall), *groups = outcome_rows(system)
    return [f"outcomes: {overall}", *(f"  {name}: {counts}" for name, counts in groups)]


def figures(system):
    """Yield the lines of figures: flaky cases, spread, latency, tokens, cost."""
    for title, key in (("flaky", "flaky_cases"), ("never passed", "never_passed")):
        yield f"{title}: " + (", ".join(system[key]) or "none")
    if system["curve"] is None:
        yield f"no pass@k and no pass^k: {system['not_run']} planned trials were not run"
    if one := system["one_trial"]:
        yield f"one trial alone would have shown {one['min']} to {one['max']} of {system['cases']} cases passed"
    latency, usage = system["latency_s"], system["usage"]
    if latency["trials"]:
        yield "latency: " + ", ".join(f"{name} {latency[name]:.3g} s" for name in ("median", "p90", "p95")) \
              + f", over {latency['trials']} answers" \
              + (f"; wall time {system['wall_s']:.0f} s" if system["wall_s"] is not None else "")
    if any(usage["trials_counted"].values()):
        yield "tokens: " + ", ".join(f"{usage[f'tokens_{way}']} {way} (of {counted} trials)"
                                     for way, counted in usage["trials_counted"].items() if counted) \
              + (f", {usage['tokens_per_s']:.1f} a second generated" if usage["tokens_per_s"] else "")
    if "cost" in usage and not usage["cost"]:
        yield "cost: not known, since no trial has both token counts"
    elif "cost" in usage:
        yield "cost: " + ", ".join(f"{value:.3g} {key.replace('_', ' ')}" for key, value in usage["cost"].items()
                                   if value is not None) + f", over {usage['trials_counted_both']} trials with both counts"


def passed_of(counts):
    """Return how many of a case's trials that ran passed, as a fraction."""
    return f"{counts['pass']}/{ran(counts)}"


def block(system, color=False):
    """Yield the lines of one system's block, as a terminal may show them."""
    # A case's id has one column a character, whatever language the rest is in.
    columns, trials = max(4, *map(len, system["per_case"])), system["trials_per_case"]
    fraction = max(6, 2 * len(str(trials)) + 1)
    yield harness.printable(f"{system['system']['name']} ({system['system']['model']}), {system['cases']} cases x "
                            f"{trials} trials, from {system['source']}")
    yield from (harness.printable("  " + line) for line in headline(system))
    yield "  " + "case".ljust(columns) + "  " + "passed".ljust(fraction) + "  95 % interval  trials (" \
          + ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()) + ")"
    for case_id, counts in system["per_case"].items():
        yield f"  {case_id.ljust(columns)}  {passed_of(counts).ljust(fraction)}  {percent(counts['interval_95']):13}  " \
              + (colored(counts["marks"]) if color else counts["marks"])
    curves = curve_lines(system) if system["curve"] else ()
    yield from (harness.printable("  " + line) for line in (*figures(system), *curves, *outcome_lines(system)))


def comparison_lines(compared):
    """Yield the lines on one comparison."""
    yield f"a: {compared['a']} ({compared['sources'][0]}), b: {compared['b']} ({compared['sources'][1]})"
    if "refused" in compared:
        yield f"  not compared: {compared['refused']}"
        return
    yield f"  mean pass rate of b minus that of a: {compared['difference']:+.4f}; cases on which b is better " \
          f"{compared['better']}, worse {compared['worse']}, equal {compared['equal']}"
    for key in ("on_these_cases", "on_cases_like_these"):
        answer = compared[key]
        yield f"  {answer['question']} {p_text(answer['p'])} ({answer['method']})" \
              + (f", 95 % interval {answer['interval_95'][0]:+.2f} to {answer['interval_95'][1]:+.2f}"
                 if answer.get("interval_95") else ", no interval" * ("interval_95" in answer))
    yield from (f"  note: {note}" for note in compared["notes"])


def p_text(p):
    """Return a p-value as text."""
    return f"p = {p:.3g}" if p else "p < 1e-300"


def decision_line(decision):
    """Return the line on one decision."""
    value = "cannot be computed" if decision["value"] is None else f"{decision['value']:.6g}"
    line = f"{'met' if decision['met'] else 'NOT MET'}: {decision['rule']} for {decision['system']} " \
           f"({decision['source']}): {value}"
    if decision.get("p") is not None:
        line += f", {p_text(decision['p'])} ({decision['method']})"
    if decision["why"]:
        line += f", {decision['why']}"
    if decision["cases"] and not decision["met"]:
        line += f"; cases behind it: {', '.join(decision['cases'])}"
    return line


def words(counts):
    """Return outcomes and their counts as text."""
    return ", ".join(f"{word} {count}" for word, count in counts.items())


def sections(report):
    """Yield the title and the lines of what follows the systems, where there is any."""
    for title, lines in (("Comparisons", [line for one in report["comparisons"] for line in comparison_lines(one)]),
                         ("Decisions", [decision_line(one) for one in report["decisions"]])):
        if lines:
            yield title, lines


FAILURE_HEAD = ("case", "trial", "outcome", "reason", "output or text")


def failure_rows(results, escape, code):
    """Yield the rows of a table of failed and incomplete results. `escape` and `code` make a cell of a text."""
    for result in results:
        yield escape(result["case_id"]), result["trial"], outcome(result), code(result["reason"]), code(said(result))


def failures_title(system, escape):
    """Return the title of a system's failures."""
    return f"Failed and incomplete trials of {escape(system['system']['name'])} ({escape(system['source'])})"


def said(result):
    """Return what a trial returned: its output as JSON, or the text that could not be used, or nothing."""
    if result["error"] is None:
        return json.dumps(result["output"], ensure_ascii=False)
    return result["error"].get("text", "")


def trial_lines(result):
    """Yield the lines on one trial: its verdict and reason, and what it returned."""
    yield f"  {result['case_id']}, trial {result['trial']} (seed {result['metadata'].get('seed', 'not known')}): " \
          f"{outcome(result)}" + (f": {result['reason']}" if result["reason"] else "")
    if said(result):
        yield f"    {said(result)}"


# --- to paste: Markdown -----------------------------------------------------------------------------------

def md(text):
    """Return a text that GitHub's Markdown shows as it is: each character that could be markup is an entity."""
    plain = r"^-|(?<=[wW]{3})[.]|[^A-Za-z0-9 .,()^=%;'\u0080-\uffff\U00010000-\U0010ffff-]"
    return re.sub(plain, lambda found: f"&#{ord(found[0])};", harness.printable(text))


def md_line(line):
    """Return a line of the report in Markdown. A note may hold what a server said, so it is a code span."""
    return md_code(line.strip(), "|") if line.startswith("note: ") else md(line.strip())


def md_code(text, bar="\\|"):
    """Return a text as a code span, in which GitHub's Markdown makes no link, mention or markup of anything. `bar` is
    what stands for a vertical bar: in a table it needs a backslash."""
    text = shortened(harness.printable(text)).replace("|", bar)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text.strip() else ""


def shortened(text):
    """Return the beginning of a long text, and that it is one."""
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + f" ... ({len(text)} characters)"


def md_table(head, rows):
    """Yield a table in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(str, row))} |\n"
    yield "\n"


def markdown(report, failures):
    """Yield the report as Markdown. `failures` yields each system's part with its failed and incomplete results."""
    yield f"# {md(report['case_set']['name'])}\n\n"
    for system in report["systems"]:
        yield f"## {md(system['system']['name'])}\n\nModel {md_code(system['system']['model'], '|')}, " \
              f"{system['cases']} cases x {system['trials_per_case']} trials, from {md(system['source'])}\n\n"
        yield "".join(f"- {md_line(line)}\n" for line in (
            *headline(system), *figures(system), *outcome_lines(system))) + "\n"
        if system["curve"]:
            yield from md_table(CURVE_HEAD, curve_rows(system))
        yield from md_table(("case", "class", "passed", "95 % interval", "outcomes", "trials"), [
            (md(case_id), md(counts["class"]), passed_of(counts),
             percent(counts["interval_95"]), md(words(counts["outcomes"])),
             md_code(counts["marks"]))
            for case_id, counts in system["per_case"].items()])
    for title, lines in sections(report):
        yield f"## {title}\n\n" + "".join(f"- {md(line.strip())}\n" for line in lines) + "\n"
    for system, results in failures:
        some = list(itertools.islice(results, MOST_FAILURES + 1))
        if some:
            yield f"## {failures_title(system, md)}\n\n"
            yield from md_table(FAILURE_HEAD, failure_rows(some[:MOST_FAILURES], md, md_code))
        if len(some) > MOST_FAILURES:
            yield f"These are the first {MOST_FAILURES}; `report.py --failures` prints them all.\n\n"


# --- to look at: HTML -------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --faint: #d4d4d4; --soft: #f3f3f3; --link: #0a5c9c;
  --pass: #0072b2; --fail: #d55e00; --incomplete: #f0e442; --band: .18; --curve-a: #0072b2; --curve-b: #b34a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --faint: #4a4a4a; --soft: #222;
  --link: #7cc0f4; --pass: #56b4e9; --fail: #e8823a; --band: .25; --curve-a: #56b4e9; --curve-b: #f0a860; } }
* { box-sizing: border-box; } html { scroll-padding-bottom: 12rem; } h3 { break-after: avoid; } tr { break-inside: avoid; }
body { margin: 0; font: 16px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
main { max-width: 68rem; margin: 0 auto; padding: 1rem 1rem 12rem; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .3rem; } h3 { font-size: 1rem; margin: 1.3rem 0 .3rem; }
p, ul { margin: .3rem 0; } .note { border-left: 4px solid var(--fail); padding-left: .6rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .6rem .15rem 0;
  vertical-align: top; } th { font-weight: 600; } tbody th { font-weight: 400; white-space: nowrap; }
.list td, .list th { border-top: 1px solid var(--faint); } code { overflow-wrap: anywhere; white-space: pre-wrap; }
.cells { display: flex; flex-wrap: wrap; gap: 2px; }
.cells button { width: 1.55rem; height: 1.55rem; padding: 0; border: 1px solid var(--ink); border-radius: 3px; cursor: pointer;
  font: 700 1rem/1 ui-monospace, monospace; color: var(--ink); background: var(--paper); }
.cells .pass { background: var(--pass); color: #fff; } .cells .fail { background: var(--fail); color: #000; }
.cells .incomplete { background: var(--incomplete); color: #000; } .cells .not-run { border-style: dashed; }
@media (prefers-color-scheme: dark) { .cells .pass, .bar .pass { color: #000; } }
.cells button:focus-visible { outline: 3px solid var(--ink); outline-offset: 2px; }
.bar { display: flex; height: 1.3rem; width: 18rem; max-width: 60vw; border: 1px solid var(--ink); }
.bar span { overflow: hidden; min-width: 12px; font: 700 .8rem/1.3rem ui-monospace, monospace; color: #000; padding-left: 2px; }
.bar .pass { background: var(--pass); color: #fff; } .bar .fail { background: var(--fail); }
.bar .incomplete { background: var(--incomplete); } .bar .not-run { background: var(--paper); color: var(--ink); }
#shown { position: fixed; left: 0; right: 0; bottom: 0; max-height: 11rem; overflow: auto; margin: 0; padding: .6rem 1rem;
  background: var(--soft); border-top: 2px solid var(--ink); font: 14px/1.4 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } .list svg { max-width: none; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--ink); fill: none; } .guide { stroke: var(--faint); } .dot { fill: var(--ink); }
.at { stroke: var(--curve-a); fill: none; stroke-width: 2; } .power { stroke: var(--curve-b); fill: none; stroke-width: 2;
  stroke-dasharray: 6 3; } .at-band { fill: var(--curve-a); opacity: var(--band); } .power-band { fill: var(--curve-b); opacity: var(--band); }
@media (max-width: 40rem) { .grid thead { display: none; } .grid tr { display: block; padding: .3rem 0; border-top: 1px solid var(--faint); }
  .grid th, .grid td { display: inline-block; } .grid td:last-child { display: block; } }
@media print { #shown { display: none; } main { padding-bottom: 1rem; } .cells button, .bar span { background: none !important; color: #000 !important; }
  .bar span { border-right: 1px solid #000; } .at, .power, .axis { stroke: #000; } .at-band, .power-band { fill: #000; } body { background: #fff; color: #000; } }
"""
SCRIPT = """
const cells = JSON.parse(document.getElementById("cells").textContent), shown = document.getElementById("shown");
let pinned = false;    // a click keeps a trial shown while the pointer goes on
const show = event => { const cell = event.target.closest("button[data-cell]");
  if (cell && !(pinned && event.type === "mouseover")) { shown.textContent = cells[cell.dataset.cell]; shown.hidden = false; }
  if (event.type === "click" && !shown.contains(event.target)) { pinned = Boolean(cell); shown.hidden = !cell; } };
for (const name of ["mouseover", "focusin", "click"]) document.addEventListener(name, show);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { pinned = false; shown.hidden = true; }
  const cell = document.activeElement.closest("button[data-cell]"), row = cell && [...cell.parentNode.children];
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (cell && step) { row[Math.min(Math.max(row.indexOf(cell) + step, 0), row.length - 1)].focus(); event.preventDefault(); }
});
"""


def h(text):
    """Return a text for HTML: every character that could be markup or a control is shown as itself."""
    import html
    return html.escape(harness.printable(str(text)))


def items(lines):
    """Return lines as an HTML list."""
    return "<ul>" + "".join(f"<li>{h(line.strip())}</li>\n" for line in lines) + "</ul>\n"


def table(title, head, rows, kind="list"):
    """Return an HTML table. The cells of `rows` are HTML already; the first of each row is its head."""
    body = "".join(f"<tr><th scope=row>{'<td>'.join(map(str, row))}</tr>\n" for row in rows)
    top = f"<thead><tr>{''.join(f'<th>{name}' for name in head)}</tr></thead>" if head else ""
    return (f"<h3>{title}</h3>\n" if title else "") \
        + f"<div class=scroll><table class={kind}>{top}<tbody>\n{body}</tbody></table></div>\n"


def page(report, cells, latencies, failures):
    """Yield the report as one page that needs nothing from elsewhere.

    `cells` maps (place of a system, case id, trial) to the text of a trial, or is None where there are too many;
    `latencies` holds each system's, ascending; `failures` is as in `markdown`.
    """
    numbers = None if cells is None else {key: number for number, key in enumerate(cells)}
    yield f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{h(report['case_set']['name'])}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>
<h1>{h(report['case_set']['name'])}</h1>
<p>Each mark is one trial: {", ".join(f"<b>{h(mark)}</b> {verdict}" for verdict, mark in MARKS.items())}. """
    yield f"There are more than {MOST_CELLS} trials, so a bar for each case stands in for its marks, and failures are " \
          "listed by <code>report.py --failures</code> alone.</p>\n" \
        if cells is None else "Point at one, tap it, or reach it with the Tab and arrow keys to see what came back; Escape puts it away.</p>\n"
    for place, system in enumerate(report["systems"]):
        yield f"<section>\n<h2>{h(system['system']['name'])}</h2>\n<p>{h(system['system']['model'])}, {system['cases']} " \
              f"cases x {system['trials_per_case']} trials, from {h(system['source'])}</p>\n"
        yield grid(place, system, numbers)
        yield "".join(f"<p{' class=note' * line.startswith('note: ')}>{h(line)}</p>\n" for line in headline(system))
        yield curves_svg(system) + cases_table(system) + latency_svg(latencies[place]) + "<h3>Figures</h3>\n"
        yield items(figures(system)) + (table("", CURVE_HEAD, curve_rows(system)) if system["curve"] else "")
        yield table("Outcomes", (), [map(h, row) for row in outcome_rows(system)]) + plan_table(system) + "</section>\n"
    for title, lines in sections(report):
        yield f"<section><h2>{title}</h2>\n{items(lines)}</section>\n"
    for system, results in failures:
        yield f"<details open><summary>{failures_title(system, h)}</summary>\n" + table(
            "", FAILURE_HEAD, failure_rows(results, h, lambda text: f"<code>{h(shortened(text))}</code>")) + "</details>\n"
    data = json.dumps(list((cells or {}).values())).replace("<", "\\u003c")
    yield "</main>\n<p id=shown tabindex=0 aria-live=polite hidden></p>\n" \
          f"<script type=\"application/json\" id=cells>{data}</script>\n<script>{SCRIPT}</script>\n</body></html>\n"


def grid(place, system, numbers):
    """Return the grid: a row a case with a cell a trial, or with one bar where `numbers` is None."""
    kinds = {mark: verdict.replace(" ", "-") for verdict, mark in MARKS.items()}

    def cells(case_id, marks):
        if numbers is None:
            shares = [(mark, marks.count(mark)) for mark in kinds if mark in marks]
            told = ", ".join(f"{count} {kinds[mark]}" for mark, count in shares)
            return f"<div class=bar role=img aria-label=\"{told}\">" + "".join(
                f"<span class={kinds[mark]} style=\"width:{100 * count / len(marks):.3f}%\">{h(mark)}</span>"
                for mark, count in shares) + f"</div>{told}"
        return "<div class=cells>" + "".join(
            f"<button class={kinds[mark]} data-cell={numbers[place, case_id, trial]} tabindex={-1 if trial else 0} "
            f"aria-label=\"{h(case_id)}, trial {trial}: {kinds[mark]}\">{h(mark)}</button>"
            for trial, mark in enumerate(marks)) + "</div>"
    return table("", ("case", "passed", "trials"), [
        (h(case_id), passed_of(counts), cells(case_id, counts["marks"]))
        for case_id, counts in system["per_case"].items()], "grid")


def curves_svg(system):
    """Return pass@k and pass^k over k with their bands, as SVG."""
    if system["curve"] is None:
        return ""
    n = system["trials_per_case"]

    def x(k):
        return 40 + 480 * (k - 1) / max(n - 1, 1)

    def y(value):
        return 190 - 170 * value

    def points(values):
        return " ".join(f"{x(k):.1f},{y(value):.1f}" for k, value in values)
    parts = [f"<line class=guide x1=40 x2=520 y1={y(v):.0f} y2={y(v):.0f} /><text x=8 y={y(v) + 4:.0f}>{v:.2f}</text>"
             for v in (0, .25, .5, .75, 1)]
    for name, kind, label in (("pass_at_k", "at", "pass@k"), ("pass_power_k", "power", "pass^k")):
        band = [(k, system["curve_interval_95"][str(k)][name]) for k in range(1, n + 1)]
        if band[0][1]:
            around = [(k, ends[1]) for k, ends in band] + [(k, ends[0]) for k, ends in reversed(band)]
            parts.append(f"<polygon class={kind}-band points=\"{points(around)}\" />")
        line = [(k, system["curve"][str(k)][name]) for k in range(1, n + 1)]
        beside = 14 if name == "pass_power_k" and y(line[-1][1]) - y(system["curve"][str(n)]["pass_at_k"]) < 14 else 0
        parts.append(f"<polyline class={kind} points=\"{points(line)}\" /><circle class={kind} r=2 cx={x(n):.1f} "
                     f"cy={y(line[-1][1]):.1f} /><text x=526 y={y(line[-1][1]) + 4 + beside:.0f}>{label}</text>")
    parts += [f"<text x={x(k):.0f} y=208 text-anchor=middle>{k}</text>"
              for k in sorted({1, n} | {k for k in SHOWN_K if k < n * 0.93})]
    return f"<h3>pass@k and pass^k{', with 95 % bands over cases' * bool(band[0][1])}</h3>\n<svg role=img viewBox=\"0 0 580 224\" width=580 " \
           f"aria-label=\"pass@k and pass^k for k from 1 to {n}\">{''.join(parts)}" \
           "<text x=280 y=222 text-anchor=middle>k</text></svg>\n"


def cases_table(system):
    """Return each case's pass rate with its interval, drawn and in figures."""
    def drawn(counts):
        line = "<svg viewBox=\"0 0 210 18\" width=210 aria-hidden=true><line class=guide x1=5 x2=205 y1=9 y2=9 />"
        if counts["interval_95"]:
            low, high = (5 + 200 * end for end in counts["interval_95"])
            line += f"<line class=axis x1={low:.1f} x2={high:.1f} y1=9 y2=9 />" \
                    f"<circle class=dot r=4 cy=9 cx={5 + 200 * counts['pass_rate']:.1f} />"
        return line + "</svg>"
    return table("Cases", ("case", "class", "pass rate", "0 to 1", "95 % interval", "distinct outputs", "outcomes"), [
        (h(case_id) + " (critical)" * counts["critical"], h(counts["class"]),
         "not run" if counts["pass_rate"] is None else counts["pass_rate"], drawn(counts),
         percent(counts["interval_95"]), counts["distinct_outputs"], h(words(counts["outcomes"]))) for case_id, counts in system["per_case"].items()])


def latency_svg(ordered):
    """Return the latencies as a strip of ticks, of at most some 400 of them evenly spaced by rank."""
    if not ordered:
        return ""
    longest = ordered[-1] or 1e-9
    places = (10 + 500 * value / longest for value in (*ordered[::max(1, len(ordered) // 400)], longest))
    ticks = "".join(f"<line class=axis x1={x:.1f} x2={x:.1f} y1=6 y2=24 />" for x in places)
    return "<h3>Latency of each answer</h3>\n<svg role=img aria-label=latencies viewBox=\"0 0 580 44\" width=580>" \
           f"<line class=guide x1=10 x2=510 y1=24 y2=24 />{ticks}<text x=10 y=40>0</text>" \
           f"<text x=510 y=40 text-anchor=end>{longest:.3g} s</text></svg>\n"


def plan_table(system):
    """Return what was frozen: who was asked what and how, on which machine."""
    identity = system["system"]
    prompt = identity["prompt"]
    facts = {"model": identity["model"], "prompt": f"{prompt.get('name')} {prompt.get('sha256')}"}
    facts |= {f"sampling: {key}": json.dumps(value) for key, value in identity["sampling"].items()}
    facts |= {"task": f"{system['task']['name']} {system['task']['sha256']}", "case set": system["case_set_sha256"],
              "recording": system["recording_sha256"], "run": system["run_id"]}
    facts |= {f"{name} in replies": ", ".join(found) for name, found in system["named_in_replies"].items() if found}
    for number, session in enumerate(system["sessions"]):
        machine = ", ".join(str(value) for value in session["environment"].values() if value)
        facts[f"session {number}"] = f"{session.get('started_at') or session.get('resumed_at')}: " \
                                     f"{session['server'] or 'no server'}, {session['workers']} workers, {machine}"
    return table("The frozen plan", (), [(h(name), f"<code>{h(value)}</code>") for name, value in facts.items()])


# --- command line -----------------------------------------------------------------------------------------

def logs_in_runs(case_set, regrade):
    """Return the logs directly in runs/; those of another case set are left out with a word."""
    found = sorted(os.path.join(harness.RUNS, name) for name in (os.listdir(harness.RUNS) if os.path.isdir(harness.RUNS) else ())
                   if name.endswith(".jsonl"))
    if not found:
        raise RunError(f"there is no trial log in {harness.RUNS}; run `python3 bench.py` first, or name one")
    key = "inputs_sha256" if regrade else "case_set_sha256"
    kept = [path for path in found if bench.TrialLog(path).header[key] == case_set[key.removeprefix("case_set_")]]
    for path in sorted(set(found) - set(kept)):
        print(harness.printable(f"left out: {os.path.basename(path)}, since it is of another case set than {case_set['file']}"))
    if not kept:
        raise RunError(f"no trial log in {harness.RUNS} is of case set {case_set['file']}")
    return kept


def parser():
    """Return the command line's parser."""
    parser = harness.command_line("Report what trial logs and run records show.")
    parser.add_argument("inputs", nargs="*", type=harness.file_name, metavar="INPUT",
                        help="trial logs (.jsonl) and run records (.json); default: every log in runs/")
    parser.add_argument("--out", type=harness.output_file, default=os.path.join(harness.RUNS, "report.json"),
                        metavar="F", help="where the report goes (default: runs/report.json beside the scripts)")
    parser.add_argument("--markdown", type=harness.output_file, metavar="F", help="write it as Markdown, to paste")
    parser.add_argument("--html", type=harness.output_file, metavar="F", help="write it as a page, to look at")
    parser.add_argument("--failures", action="store_true", help="print each failed or incomplete trial")
    parser.add_argument("--case", metavar="ID", help="print one case whole")
    parser.add_argument("--require", type=rule, action="append", default=[], metavar="RULE",
                        help="such as 'pass^3>=0.8'; exit 3 where it is not met (repeatable)")
    parser.add_argument("--lower-bound", action="store_true", help="test the lower end of pass@K's and pass^K's interval")
    parser.add_argument("--baseline", type=harness.file_name, metavar="REPORT", help="exit 3 where a system has got worse")
    for way in ("in", "out"):
        parser.add_argument(f"--price-{way}", type=harness.number_from(0, float), metavar="P",
                            help=f"price of a million {way}put tokens")
    harness.add_benchmark_options(parser)
    bench.add_regrade_option(parser)
    return parser


def build(runs, case_set, args):
    """Return (the report, each system's latencies in ascending order) of the runs, a list of files each."""
    baseline = args.baseline and harness.read_json(args.baseline)
    names, systems, latencies = Counter(os.path.basename(paths[0]) for paths in runs), [], []
    for paths in runs:
        name = os.path.basename(paths[0])
        source = name if names[name] == 1 else paths[0]
        source += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        system, ordered = summarize(source, *counted(paths, args), case_set, (args.price_in, args.price_out))
        systems.append({"case_set_sha256": case_set["sha256"]} | system)
        latencies.append(ordered)
    decisions = [decide(wanted, system, args.lower_bound) for wanted in args.require for system in systems]
    decisions += [against_baseline(system, baseline, args.baseline) for system in systems if args.baseline]
    return {"report_version": REPORT_VERSION, "case_set": harness.named_case_set(case_set), "systems": systems,
            "comparisons": [compare(a, b) for i, a in enumerate(systems) for b in systems[i + 1:]],
            "decisions": decisions}, latencies


def write_out(report, latencies, runs, args):
    """Write the report and, where they are asked for, its Markdown and its page, whose trials are read once more."""
    systems = report["systems"]

    def failures():
        return ((system, (result for result in graded_trials(paths, args) if result["verdict"] != "pass"))
                for system, paths in zip(systems, runs))
    harness.write(args.out, [json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1), "\n"])
    if args.markdown:
        harness.write(args.markdown, markdown(report, failures()))
    if args.html:
        few = sum(system["cases"] * system["trials_per_case"] for system in systems) <= MOST_CELLS
        cells = {(place, result["case_id"], result["trial"]): "\n".join(
                     shortened(harness.printable(line.strip())) for line in trial_lines(result))
                 for place, paths in enumerate(runs) for result in graded_trials(paths, args)} if few else None
        harness.write(args.html, page(report, cells, latencies, failures() if few else ()))


def print_trials(report, runs, args, case_set):
    """Print the trials that --failures or --case asks for."""
    if args.case:
        cases = {case["id"]: case for case in harness.in_splits(case_set, ["development"])}
        asked = cases.get(args.case)
        if asked is None:
            raise RunError(f"{case_set['file']} has no development case {args.case!r}; it has {', '.join(cases)[:500]}")
        print(harness.printable(json.dumps(asked, ensure_ascii=False)))
    for system, paths in zip(report["systems"], runs):
        print(harness.printable(f"{system['system']['name']}, from {system['source']}"))
        for note in system["notes"]:
            print(harness.printable(f"  note: {note}"))
        for result in graded_trials(paths, args):
            if result["case_id"] == args.case or not args.case and result["verdict"] != "pass":
                for line in trial_lines(result):
                    print(harness.printable(line))


def main(argv=None):
    """Report, and return the exit status: 3 where a rule is not met."""
    args = parser().parse_args(argv)
    if (args.price_in is None) != (args.price_out is None):
        parser().error("--price-in and --price-out go together")
    if args.lower_bound and any(metric.startswith("pass") and sign[0] != ">" for _, metric, sign, _ in args.require):
        parser().error("--lower-bound goes with rules that say > or >=")
    loaded.cache_clear()    # the files may have changed since an earlier call
    case_set, _ = loaded(args.cases, args.task)
    inputs = args.inputs or logs_in_runs(case_set, args.regrade)
    outputs = [path for path in (args.out, args.markdown, args.html) if path]
    harness.refuse_inputs(outputs, [*inputs, args.baseline, args.cases])
    if len(set(map(os.path.realpath, outputs))) < len(outputs):
        raise RunError("the report, the Markdown and the page go to files of their own")
    runs = runs_of(inputs)
    report, latencies = build(runs, case_set, args)
    write_out(report, latencies, runs, args)
    if args.failures or args.case:
        print_trials(report, runs, args, case_set)
    else:
        color = sys.stdout and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for system in report["systems"]:
            print("\n".join(block(system, color)), end="\n\n")
        for one in report["comparisons"]:
            print("\n".join(map(harness.printable, comparison_lines(one))), end="\n\n")
    for decision in report["decisions"]:
        print(harness.printable(decision_line(decision)))
    for path in outputs:
        print(f"written: {path}")
    return 0 if all(decision["met"] for decision in report["decisions"]) else 3


if __name__ == "__main__":
    sys.exit(harness.run_command(main))
