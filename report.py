#!/usr/bin/env python3
"""Read trial logs and run records; say what they show: counts, flaky cases, pass@k and pass^k, latency.

    python3 report.py                                       every log in runs/
    python3 report.py recorded/smollm2.jsonl --out report.json

A metric that the data cannot support is not printed: with any planned trial not run there is no curve.
"""
import argparse
import json
import math
import os
import sys
from array import array
from collections import Counter
from pathlib import Path

import bench
import harness
from harness import RunError

REPORT_VERSION = "1"
MARKS = {"pass": "+", "fail": "x", "incomplete": "!", "not run": "."}
SHOWN_K = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


# --- metrics ----------------------------------------------------------------------------------------------

def pass_power_k(n, c):
    """Return, for k = 1 to n, the chance that all k trials drawn without replacement from n, of which c passed,
    pass: C(c, k) / C(n, k), the pass^k of Yao et al. 2024, "tau-bench". (By the ratio from one k to the next.)"""
    chances, chance = [], 1.0
    for drawn in range(n):
        chance *= max(c - drawn, 0) / (n - drawn)
        chances.append(chance)
    return chances


def pass_at_k(n, c):
    """Return, for k = 1 to n, the chance that at least one of k trials drawn without replacement from n, of which
    c passed, passes: 1 - C(n-c, k) / C(n, k), equation 1 of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code". (1 - (1 - c/n)^k would be biased.)"""
    return [1 - none_passes for none_passes in pass_power_k(n, n - c)]


def curve(n, passes):
    """Return both metrics for k = 1 to n, each a mean over cases, from each case's passes of n trials."""
    cases = Counter(passes)

    def means(metric):
        by_case = [(count, metric(n, c)) for c, count in cases.items()]
        return [round(math.fsum(count * values[k] for count, values in by_case) / len(passes), 4) for k in range(n)]
    return {str(k): {"pass_at_k": at, "pass_power_k": power}
            for k, (at, power) in enumerate(zip(means(pass_at_k), means(pass_power_k)), 1)}


def nearest_rank(ordered, percent):
    """Return the percentile of an ascending sequence by nearest rank: the smallest value that at least `percent`
    per cent of the values do not exceed. None where there are no values."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def is_flaky(counts):
    """True if, among the trials of a case that ran, some passed and some did not."""
    return counts["pass"] > 0 and counts["fail"] + counts["incomplete"] > counts["not_run"]


def never_passed(counts):
    """True if a case ran at least once and never passed."""
    return counts["pass"] == 0 and counts["fail"] + counts["incomplete"] > counts["not_run"]


# --- reading ----------------------------------------------------------------------------------------------

def from_log(path, case_set, task):
    """Return (manifest, results) of a trial log, graded row by row on the way. `results` streams; the manifest
    has its `recording_sha256` once they are exhausted. Raises RunError for a log of another case set."""
    log = bench.read_log(path, case_set)
    cases = {case["id"]: case for case in harness.in_splits(case_set, log.header["splits"])}
    manifest = harness.manifest(log.header | {"sessions": log.sessions}, case_set, task, None)

    def results():
        digest = harness.TrialDigest(log.header["trials"])
        for row in log.rows():
            digest.add(harness.recorded(row))
            yield harness.graded(cases[row["case_id"]], row, log.header["run_id"], task.checks)
        for case, trial in harness.plan(case_set, log.header["splits"], log.header["trials"]):
            if not log.holds(case["id"], trial):
                row = harness.not_run(case["id"], trial)
                digest.add(row)
                yield harness.graded(case, row, log.header["run_id"], task.checks)
        manifest["recording_sha256"] = digest.hexdigest()
    return manifest, results()


def from_run_record(path, case_set):
    """Return (manifest, results) of a run record. Raises RunError where it is none, or of another case set."""
    record = harness.read_json(path)
    try:
        manifest, results = record["manifest"], record["results"]
        harness.of_case_set({"case_set_sha256": manifest["case_set"]["sha256"],
                             "inputs_sha256": manifest["case_set"]["inputs_sha256"]}, case_set, path)
        case_ids = {case["id"] for case in harness.in_splits(case_set, manifest["splits"])}
        faults = (harness.result_fault(result, case_ids, manifest["trials"]) for result in results)
        if fault := next((f"result {number}: {fault}" for number, fault in enumerate(faults, 1) if fault), None):
            raise RunError(f"{path}: {fault}")
        seen = {(result["case_id"], result["trial"]) for result in results}
        if not len(seen) == len(results) == len(case_ids) * manifest["trials"]:
            raise RunError(f"{path} does not hold each planned trial of {case_set['file']} once")
        needed = ("run_id", "system", "task", "trials", "splits", "sessions", "recording_sha256")
        what_mixes(manifest["sessions"], [])
        return {key: manifest[key] for key in needed}, results
    except (TypeError, LookupError, AttributeError):
        raise RunError(f"{path} is not a run record (`harness.py run` writes one); a trial log ends in .jsonl") from None


def summarize(source, manifest, results, case_set):
    """Return a system's part of the report from its graded trials, of which only counts, marks and latencies
    are kept. `source` names the file they come from."""
    trials = manifest["trials"]
    cases = harness.in_splits(case_set, manifest["splits"])
    marks = {case["id"]: bytearray(MARKS["not run"] * trials, "ascii") for case in cases}
    failures, errors, latencies, named = Counter(), Counter(), array("d"), set()
    for result in results:
        named.add(tuple(name if isinstance(name := result["metadata"].get(key), str) else None for key in ("model", "server")))
        error = result["error"]["types"][0] if result["verdict"] == "incomplete" else None
        if error != "NotRun":
            marks[result["case_id"]][result["trial"]] = ord(MARKS[result["verdict"]])
        if result["verdict"] == "fail":
            failures[result["check"]] += 1
        elif error:
            errors[error] += 1
        if result["error"] is None:
            latencies.append(result["metadata"]["recorded_latency_s"])
    per_case = {case["id"]: {"class": case["class"]} | counts_of(marks[case["id"]].decode()) for case in cases}
    verdicts = {verdict: sum(counts[verdict] for counts in per_case.values()) for verdict in ("pass", "fail", "incomplete")}
    missing = sum(counts["not_run"] for counts in per_case.values())
    ordered = sorted(latencies)
    return {
        "system": manifest["system"], "source": source, "run_id": manifest["run_id"],
        "recording_sha256": manifest["recording_sha256"], "task": manifest["task"],
        "sessions": manifest["sessions"], "mixed": what_mixes(manifest["sessions"], named),
        "trials_per_case": trials, "cases": len(cases), "verdicts": verdicts, "not_run": missing,
        "failures_by_check": dict(failures.most_common()), "incomplete_by_error": dict(errors.most_common()),
        "per_case": per_case,
        "flaky_cases": [case_id for case_id, counts in per_case.items() if is_flaky(counts)],
        "never_passed": [case_id for case_id, counts in per_case.items() if never_passed(counts)],
        "curve": None if missing else curve(trials, [counts["pass"] for counts in per_case.values()]),
        "latency_s": {"trials": len(ordered), "median": nearest_rank(ordered, 50), "p90": nearest_rank(ordered, 90)},
    }


def what_mixes(sessions, named):
    """Return what differs within a log, as a dict of lists: between its sessions, or between its replies (`named`
    holds the pairs of model and server that they name)."""
    values = {key: [session[key] for session in sessions] for key in ("server", "endpoint", "workers")}
    values |= {key: [session["environment"].get(key) for session in sessions] for key in ("python", "platform", "hardware")}
    values |= {"model in replies": [model for model, _ in named], "server in replies": [server for _, server in named]}
    distinct = {key: sorted({str(value) for value in found if value is not None}) for key, found in values.items()}
    return {key: found for key, found in distinct.items() if len(found) > 1}


def counts_of(marks):
    """Return a case's counts, not-run trials among the incomplete ones, and its marks in order of trial."""
    not_run = marks.count(MARKS["not run"])
    return {"pass": marks.count(MARKS["pass"]), "fail": marks.count(MARKS["fail"]),
            "incomplete": marks.count(MARKS["incomplete"]) + not_run, "not_run": not_run, "marks": marks}


# --- showing ----------------------------------------------------------------------------------------------

def block(system):
    """Yield the lines of one system's block for the terminal."""
    verdicts, width = system["verdicts"], max(map(len, system["per_case"]))
    trials = system["trials_per_case"]
    yield f"{system['system']['name']} ({system['system']['model']}), {system['cases']} cases x {trials} trials, " \
          f"from {system['source']}"
    yield f"  {verdicts['pass']} pass, {verdicts['fail']} fail, {verdicts['incomplete']} incomplete" \
          + (f" ({system['not_run']} of them not run)" if system["not_run"] else "")
    for key, found in system["mixed"].items():
        yield f"  this log mixes {key}: {', '.join(found)}; its trials may not be alike"
    for title, key in (("failed at", "failures_by_check"), ("incomplete by", "incomplete_by_error")):
        if system[key]:
            yield f"  {title}: " + ", ".join(f"{name} {count}" for name, count in system[key].items())
    yield "  " + "case".ljust(width) + "  passed  trials (" + ", ".join(f"{m} {v}" for v, m in MARKS.items()) + ")"
    for case_id, counts in system["per_case"].items():
        yield f"  {case_id.ljust(width)}  {counts['pass']}/{trials}".ljust(width + 12) + counts["marks"]
    for title, key in (("flaky", "flaky_cases"), ("never passed", "never_passed")):
        yield f"  {title}: " + (", ".join(system[key]) or "none")
    if system["curve"] is None:
        yield f"  no pass@k and no pass^k: {system['not_run']} planned trials were not run"
    else:
        shown = [str(k) for k in SHOWN_K if k < trials] + [str(trials)]
        for title, values in (("k", shown), ("pass@k", [f"{system['curve'][k]['pass_at_k']:.4f}" for k in shown]),
                              ("pass^k", [f"{system['curve'][k]['pass_power_k']:.4f}" for k in shown])):
            yield f"  {title:8}" + " ".join(value.rjust(6) for value in values)
    if system["latency_s"]["trials"]:
        yield "  latency: median {median:.3g} s, p90 {p90:.3g} s, over {trials} answers".format(**system["latency_s"])


# --- command line -----------------------------------------------------------------------------------------

def logs_in_runs(case_set):
    """Return (the logs directly in runs/, those of another case set left out with a word)."""
    found = sorted((harness.HERE / "runs").glob("*.jsonl"))
    if not found:
        raise RunError(f"there is no trial log in {harness.HERE / 'runs'}; run `python3 bench.py` first, or name one")
    kept = [path for path in found if bench.TrialLog(path).header["case_set_sha256"] == case_set["sha256"]]
    for path in sorted(set(found) - set(kept)):
        print(f"left out: {path.name}, since it is of another case set than {case_set['file']}")
    if not kept:
        raise RunError(f"no trial log in {harness.HERE / 'runs'} is of case set {case_set['file']}")
    return kept


def main(argv=None):
    parser = argparse.ArgumentParser(description="Report what trial logs and run records show.")
    parser.add_argument("inputs", nargs="*", type=harness.file_name, metavar="INPUT",
                        help="trial logs (.jsonl) and run records (.json); default: every log in runs/")
    parser.add_argument("--out", type=harness.output_file, default=str(harness.HERE / "runs" / "report.json"),
                        metavar="F", help="where the report goes (default: runs/report.json beside the scripts)")
    harness.add_benchmark_options(parser)
    args = parser.parse_args(argv)
    task = harness.load_task(args.task)
    case_set = harness.load_cases(args.cases, task)
    systems = []
    for path in args.inputs or logs_in_runs(case_set):
        is_log = str(path).endswith(".jsonl")
        manifest, results = from_log(path, case_set, task) if is_log else from_run_record(path, case_set)
        systems.append(summarize(Path(path).name, manifest, results, case_set))
    report = {"report_version": REPORT_VERSION, "case_set": {key: case_set[key] for key in ("name", "sha256", "inputs_sha256")},
              "systems": systems}
    if any(os.path.exists(args.out) and os.path.samefile(args.out, path) for path in args.inputs):
        raise RunError(f"{args.out} is an input; name another --out")
    harness.write(args.out, [json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1), "\n"])
    for system in systems:
        print("\n".join(map(harness.printable, block(system))), end="\n\n")
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_command(main))
