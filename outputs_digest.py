#!/usr/bin/env python3
"""Print a digest of what the trials of each log returned, free of times, to compare recordings of the same seeds.

    python3 outputs_digest.py runs/embedded-triage.jsonl

One line a log: the digest, the number of trials, the file. Two logs with equal digests hold the same outputs
(or the same errors) for the same cases and trials.
"""
import sys

import bench
import harness


def returned(row):
    """Return what counts of a trial: its output, or its error's types."""
    held = {"error": row["error"]["types"]} if "error" in row else {"output": row["output"]}
    return {"case_id": row["case_id"], "trial": row["trial"]} | held


def outputs_digest(path):
    """Return (digest, number of trials) of a log. Raises RunError where it is none."""
    log = bench.TrialLog(path)
    digest = harness.TrialDigest(log.header["trials"])
    for row in log.rows():
        digest.add(returned(row))
    return digest.hexdigest(), log.count


def main(argv=None):
    parser = harness.command_line("Print a digest of what the trials of each log returned.")
    parser.add_argument("logs", nargs="+", metavar="LOG")
    for path in parser.parse_args(argv).logs:
        digest, count = outputs_digest(path)
        print(digest, count, path)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_command(main))
