#!/usr/bin/env python3
"""Run every case of a case set many times against a system, and log each trial the moment it ends.

    python3 bench.py                                        9 cases x 10 trials on the embedded system
    python3 bench.py --system model_triage:gemma --trials 30 --budget-s 3600
    python3 bench.py --convert recording.json               the log as a recording, at any point
    python3 bench.py --trials 100 --shard 1/4               a quarter of a plan, to be put together by report.py

The log is the original record (JSON Lines: a header, a line a trial, a line a resume). The same command again
resumes it: no trial that it holds is run twice, and only the same benchmark continues it.
"""
import argparse
import contextlib
import errno
import itertools
import json
import os
import re
import sys
import threading
import time

import harness
from harness import RunError

BENCH_VERSION = "1"
DEFAULT_SYSTEM = "model_triage:embedded"
COMPARED = ("bench_version", "harness_version", "inputs_sha256", "case_set_sha256", "system", "splits", "trials",
            "shard")
DESCRIBING = ("budget_s", "workers", "environment", "endpoint", "server", "task", "cases")
SERVER_FAILURES = {"ReplyTimeout", "ConnectionCut", "ServerError", "MalformedReply"}
MODEL_OPTIONS = ("endpoint", "timeout_s", "temperature", "max_tokens", "top_p", "format", "think", "extra_body")
LINES_AT_ONCE = 2**16    # bytes
STRETCH = 16 * 2**20    # bytes of a log that report.py counts at a time
SHORTEST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30
LONGEST_RETRY_AFTER_S = 120
LOCK_BYTE = 1 << 40    # Windows locks bytes: one far behind the end leaves readers alone


class Interrupted(BaseException):
    """A signal asked the run to stop at once. Its argument is the signal's number."""


signals = []    # those that have come: Python drops an exception that a handler raises in the middle of a clean-up


# --- the trial log ----------------------------------------------------------------------------------------

def read_lines(path, start=0, stop=float("inf"), number=1):
    """Yield (line number, offset of the line's end, value) for each line of a JSON Lines file, from the line `number`,
    which begins at the offset `start`, to the offset `stop`.

    Only b"\\n" ends a line, since a reply may hold what other readers take for one. A last line without it that
    is not JSON is what a killed run, a full disk or a power cut leaves: it is passed over. Any other line that
    is not JSON raises RunError.
    """
    with open(path, "rb") as file:
        file.seek(start)
        while lines := file.readlines(LINES_AT_ONCE):
            values = harness.parse_lines(lines)
            for place, line in enumerate(lines):
                if start >= stop:
                    return
                try:
                    value = values[place] if values else harness.parse_json(line.decode("utf-8"), harness.FILE_NESTING)
                except ValueError as error:
                    if number > 1 and not line.endswith(b"\n"):
                        return
                    raise RunError(f"{path}: line {number} is not JSON ({error}); " + (
                        "is it a trial log?" if number == 1 else "restore it from a copy, or move the log away")) from None
                start += len(line)
                yield number, start, value
                number += 1


def stretches(path):
    """Yield (start, stop, line number) of stretches of a log's lines after the header, for `read_lines`: each of about
    STRETCH bytes, the last to whatever is the log's end when it is read."""
    with open(path, "rb") as file:
        start, number = len(file.readline()), 2
        while len(block := file.read(STRETCH)) == STRETCH and (rest := file.readline()).endswith(b"\n"):
            stop = start + len(block) + len(rest)
            yield start, stop, number
            start, number = stop, number + block.count(b"\n") + 1
        yield start, float("inf"), number


def header_fault(header):
    """Return what is wrong with a log's first line, or None."""
    if not (isinstance(header, dict) and "bench_version" in header):
        return "the file is not a trial log: its first line is no header"
    kinds = {"bench_version": str, "harness_version": str, "run_id": str, "started_at": str, "inputs_sha256": str,
             "case_set_sha256": str, "system": dict, "splits": list, "trials": int, "shard": (str, type(None))}
    fault = harness.kind_fault(header, kinds) or harness.plan_fault(header) or session_fault(header)
    try:
        shard_numbers(header["shard"])
    except ValueError:
        fault = fault or f"`shard` is {header['shard']!r}"
    return f"the header's {fault}" if fault else None


def shard_numbers(shard):
    """Return (I, N) of a header's `shard`, "I/N"; a whole plan is shard 1 of 1. Raises ValueError for any other text."""
    found = re.fullmatch("([1-9][0-9]{0,6})/([1-9][0-9]{0,6})", "1/1" if shard is None else shard)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"{shard!r} is not I/N with I from 1 to N")
    return int(found[1]), int(found[2])


def session_fault(line):
    """Return what is wrong with the keys that describe a session (of the header or of a resume line), or None."""
    kinds = {"budget_s": (int, float, type(None)), "workers": int, "environment": dict, "task": dict, "cases": str,
             "endpoint": (str, type(None)), "server": (str, type(None))}
    return harness.kind_fault(line, kinds) or harness.kind_fault(line["task"], {"name": str, "sha256": str})


class TrialLog:
    """A trial log on the disk: read row by row and, opened for writing, locked and appended to.

    `header` is its first line, `numbers` the trial numbers of its plan; `sessions` describes the first session and
    each that resumed it, as read so far; `held` tells which trials were read or appended (case id -> a byte a trial),
    `count` how many; `end` is where the last whole line ends, `began` when the trial read last began (in seconds since
    1970).
    """

    def __init__(self, path, writable=False, stretch=None):
        """Only the lines of `stretch` (see `stretches`) are read, by default all after the header. Raises RunError for
        a file that is no log, or that another process is writing."""
        self.path, self.file = path, None
        self.regraded_from, self.where = None, "the log"
        self.next_session = None    # the line of a resume, to be appended once all logs of the run are ready
        self.case_ids = None    # where given, the cases of the plan: a trial of any other is refused
        self.held, self.count, self.incomplete = {}, 0, 0
        if os.path.exists(path) and not os.path.isfile(path):
            raise RunError(f"{path} is not a regular file, so it can be no trial log")
        if writable:
            self.file = open(path, "r+b", buffering=0)
            self._lock()
        try:
            _, self.end, self.header = next(read_lines(path), (0, 0, None))
            if fault := header_fault(self.header):
                raise RunError(f"{path}: line 1: {fault}")
            self.lines = read_lines(path, *(stretch or (self.end, float("inf"), 2)))
            self.numbers = planned_numbers(self.header)
            self.sessions = [{key: self.header[key] for key in ("started_at", *DESCRIBING)}]
        except BaseException:
            self.close()
            raise
        self.synced_at, self.appended = time.monotonic(), False

    def _lock(self):
        # flock and not lockf, whose lock vanishes when any other handle of this process on the file is closed.
        try:
            if os.name == "nt":
                import msvcrt
                self.file.seek(LOCK_BYTE)
                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.register_at_fork(after_in_child=self.close)    # a system's child would hold the lock on
        except OSError as error:
            self.file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise RunError(f"{self.path} cannot be locked: {error.strerror}; keep it on another disk") from None
            raise RunError(f"{self.path} is being written by another run; wait for it, or name another --log") from None

    def rows(self):
        """Yield each trial, checked. Raises RunError, naming the line, for one that cannot be of this log."""
        for number, end, row in self.lines:
            if fault := self._fault(row):
                raise RunError(f"{self.path}: line {number}: {fault}; the log was left as it is")
            self.end = end
            self._keep(row)
            if "case_id" in row:
                yield row

    def _fault(self, row):
        if isinstance(row, dict) and "case_id" not in row:
            if "bench_version" in row:
                return "a second header: two logs were put together"
            if isinstance(row.get("resumed_at"), str):
                return session_fault(row)
        if fault := harness.row_fault(row, self.case_ids, self.header["trials"]):
            return fault
        if row["trial"] not in self.numbers:
            return f"trial {row['trial']} is not of the log's shard {self.header['shard']}"
        if "error" in row and harness.is_not_run(row):
            return "a log holds no trial that was not run"
        try:
            self.began = harness.seconds(row["started_at"])
        except (TypeError, ValueError, LookupError):
            return "`started_at` must be a time"
        if self.holds(row["case_id"], row["trial"]):
            return f"case {row['case_id']}, trial {row['trial']} is in {self.where} twice"
        return None

    def holds(self, case_id, trial):
        """True if the trial is in the log."""
        return case_id in self.held and bool(self.held[case_id][trial])

    def _keep(self, row):
        if "case_id" in row:
            if row["case_id"] not in self.held:
                self.held[row["case_id"]] = bytearray(self.header["trials"])
            self.held[row["case_id"]][row["trial"]] = 1
            self.count += 1
        else:
            self.sessions.append(row)

    def append(self, row):
        """Write one line after the last whole one, and give it to the operating system.

        Raises RunError where it cannot be written; what was in the log before is safe.
        """
        line = harness.encode(row) + b"\n"
        try:
            self._write_at_end(line)
            self._keep(row)
            if time.monotonic() - self.synced_at >= 1:
                self.sync()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error):
        self.close()
        return RunError(f"{self.path} cannot be written: {error.strerror}; {self.count} trials are safe in it, "
                        "and the same command resumes it once it can be written again")

    def _write_at_end(self, line):
        try:
            end = self.file.seek(0, os.SEEK_END)
            if end != self.end and self.appended:
                self.close()
                raise RunError(f"{self.path} was changed by something else while the run wrote to it; "
                               "it was left as it is")
            if not self.appended:
                self.file.truncate(self.end)    # what a killed run left of a line
                self.file.seek(self.end - 1)
                if self.file.read(1) != b"\n":    # a whole last line that lost its line break
                    line = b"\n" + line
            rest = memoryview(line)
            while rest:
                rest = rest[self.file.write(rest):]
            self.end, self.appended = self.end + len(line), True
        except OSError:
            self.file.truncate(self.end)
            raise

    def sync(self):
        """Have the operating system put the log on the disk itself."""
        if os.fstat(self.file.fileno()).st_nlink == 0:
            raise RunError(f"{self.path} was deleted while the run wrote to it; its trials are lost")
        if sys.platform == "darwin":    # where fsync stops at the drive's own cache
            import fcntl
            fcntl.fcntl(self.file, fcntl.F_FULLFSYNC)
        else:
            os.fsync(self.file.fileno())
        self.synced_at = time.monotonic()

    def finish(self):
        """Put all of the log on the disk, and close it. Raises RunError where that fails."""
        try:
            self.sync()
        except OSError as error:
            raise self._unwritable(error) from None
        finally:
            self.close()

    def close(self):
        """Let another process write. Nothing can be appended after."""
        if self.file is not None:
            self.file.close()

    @property
    def closed(self):
        return self.file is None or self.file.closed


def differences(name, logged, now, there="there", here="here"):
    """Yield where two values of the key `name` differ, down to the inner key, with both where they are short."""
    old, new = (harness.encode(value, sort_keys=True).decode() for value in (logged, now))
    if old == new:
        return
    if isinstance(logged, dict) and isinstance(now, dict):
        for key in sorted(set(logged) | set(now)):
            if key in logged and key in now:
                yield from differences(f"{name}.{key}", logged[key], now[key], there, here)
            else:
                yield f"{name}.{key} (only {there if key in logged else here})"
    else:
        yield f"{name} ({old} {there}, {new} {here})" if len(old + new) < 100 else name


def refuse_other_benchmark(path, logged, now, other=None):
    """Raise RunError, naming what differs, unless two headers are of the same benchmark: a log's and that of a run, or
    that of the log `other`."""
    found = [line for key in COMPARED
             for line in differences(key, logged.get(key), now[key], "there", f"in {other}" if other else "here")]
    if found:
        advice = "" if other else "; name another --log"
        raise RunError(f"{path} is a log of another benchmark: {'; '.join(found)}{advice}" + (
            " (what it holds can be graded with today's answers: report.py --regrade)"
            if found == ["case_set_sha256"] and not other else ""))


def read_log(path, case_set, regrade=False, **stretch):
    """Return the log at `path`, to be read. Raises RunError where it is none, or of another case set; with
    `regrade`, `regraded_from` of the log is the digest of the set of the same inputs that it was made from."""
    log = TrialLog(path, **stretch)
    log.regraded_from = harness.of_case_set(log.header, case_set, path, regrade)
    log.case_ids = planned_ids(log.header, case_set)
    return log


def planned_ids(header, case_set):
    """Return the ids of the cases that a log's plan has."""
    return {case["id"] for case in harness.in_splits(case_set, header["splits"])}


def planned_numbers(header):
    """Return the trial numbers that a log's plan has: all, or those of its shard."""
    first, step = shard_numbers(header["shard"])
    return range(first - 1, header["trials"], step)


def planned_trials(header, case_set):
    """Return how many trials a log's plan has."""
    return len(planned_ids(header, case_set)) * len(planned_numbers(header))


def missing_trials(log, case_set, numbers):
    """Yield the (case, trial) that a log lacks of these trial numbers, in trial-major order."""
    cases = harness.in_splits(case_set, log.header["splits"])
    return ((case, trial) for trial in numbers for case in cases if not log.holds(case["id"], trial))


def read_shards(paths, case_set, regrade=False):
    """Return the logs at `paths`, to be read one after the other: a single one, or shards of one plan, of which each
    refuses a trial that one before it holds. Raises RunError as `read_log` does, and for logs of different plans."""
    logs = [read_log(path, case_set, regrade) for path in paths]
    logs.sort(key=lambda log: shard_numbers(log.header["shard"]))
    first = logs[0]
    for log in logs[1:]:
        if first.header["shard"] is None or log.header["shard"] is None:
            whole = first if first.header["shard"] is None else log
            raise RunError(f"{whole.path} is the log of a whole plan; only the logs of shards are put together")
        refuse_other_benchmark(log.path, log.header, first.header | {"shard": log.header["shard"]}, first.path)
        if log.numbers.step != first.numbers.step:
            raise RunError(f"{log.path} is of shard {log.header['shard']} and {first.path} of {first.header['shard']}: "
                           "these are not shards of one plan")
        log.held, log.where = first.held, "the logs"
    return logs


def sessions_of(log):
    """Return the sessions of a log as what is made from it holds them: those of a shard name it and its run, since
    a trial's `session` counts within its own log."""
    shard = {"shard": log.header["shard"], "run_id": log.header["run_id"]} if log.header["shard"] else {}
    return [session | shard for session in log.sessions]


def to_recording(path, case_set, regrade=False, others=()):
    """Return the recording of a log, in trial-major order: every planned trial, `NotRun` where the log lacks it.
    `others` are the logs of further shards of its plan.

    Raises RunError for a log of another case set (but see `read_log`), and for one with a line that cannot be of it.
    """
    logs = read_shards([path, *others], case_set, regrade)
    rows = {(row["case_id"], row["trial"]): harness.recorded(row) for log in logs for row in log.rows()}
    header = logs[0].header
    kept = ("run_id", "harness_version", "system", "inputs_sha256", "splits", "trials")
    planned = harness.plan(case_set, header["splits"], header["trials"])
    return {key: header[key] for key in kept} | {
        "case_set_sha256": case_set["sha256"], "regraded_from": logs[0].regraded_from,
        "sessions": [session for log in logs for session in sessions_of(log)],
        "results": [rows.get((case["id"], trial)) or harness.not_run(case["id"], trial) for case, trial in planned]}


# --- the run ----------------------------------------------------------------------------------------------

class Run:
    """The trials of one system still to run, shared by the workers: what is next, what ends the run, what was done."""

    def __init__(self, system, log, planned, began_at, budget_s, patience_s, request_delay_s):
        self.system, self.log, self.planned, self.patience_s = system, log, planned, patience_s
        self.began_at = self.next_start = began_at
        self.ends_at = began_at + budget_s if budget_s is not None else float("inf")
        self.request_delay_s = request_delay_s
        self.todo = iter(())
        self.logged, self.ran, self.incomplete = log.count, 0, log.incomplete
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.fault = None
        self.stopped_by_budget = False
        self.failures = 0    # server failures in a row

    def work(self):
        """What each worker does, until nothing is left or the run is stopped."""
        try:
            while True:
                planned = self.next_trial()
                if planned is None or self.budget_spent():
                    return
                row = self.call(*planned)
                if row is None:
                    return
                self.append(row, *planned)
        except BaseException as fault:    # raised again in the main thread, by `execute`
            self.fault = self.fault or fault
            self.stopping.set()

    def next_trial(self):
        """Return the next (case, trial) that the log lacks, or None."""
        with self.lock:
            return None if self.stopping.is_set() else next(self.todo, None)

    def budget_spent(self):
        """True once no new trial may start; the run then counts as stopped by its time budget."""
        self.stopped_by_budget |= time.monotonic() >= self.ends_at
        return self.stopped_by_budget

    def call(self, case, trial):
        """Return the trial's row, or None where the run stops while a server is waited for.

        Raises what `patiently` raises. Until a trial of the run has ended there is no patience for a server that
        cannot be reached: it is more likely wrong than down.
        """
        def ask():
            self.ask_for_life()
            if not self.keep_pace():
                return None
            try:
                return harness.now(), harness.attempt(self.system, case, trial)
            except harness.Unavailable as error:
                if self.ran:
                    raise
                raise RunError(str(error)) from None
        away = (harness.Unavailable, harness.Busy)
        answer, waits, waited_s = patiently(ask, away, self.patience_s, self.pause)
        if answer is None:
            return None
        started_at, result = answer
        # The number of the session tells whose server, Python and machine it was.
        metadata = {"session": len(self.log.sessions) - 1} | result["metadata"]
        if waits:
            metadata |= {"waits": waits, "waited_s": round(waited_s, 3)}
        return {"case_id": case["id"], "trial": trial, "started_at": started_at} | result | {"metadata": metadata}

    def ask_for_life(self):
        """Raise Unavailable where the server failed three times in a row and now gives no sign of life."""
        if self.failures >= 3:
            if harness.ask(self.system, "alive") is False:
                raise harness.Unavailable("the server failed three times in a row and gives no sign of life")
            self.failures = 0

    def keep_pace(self):
        """Wait until the next request may start; return False where the run stops meanwhile."""
        with self.lock:
            now = time.monotonic()
            starts_at = max(now, self.next_start)
            self.next_start = starts_at + self.request_delay_s
        return starts_at == now or self.pause(starts_at - now)

    def pause(self, seconds):
        """Wait; return False where the run stops meanwhile."""
        stopped = self.stopping.wait(max(0, min(seconds, self.ends_at - time.monotonic())))
        return not stopped and not self.budget_spent()

    def append(self, row, case, trial):
        """Log a trial that has ended. After an interrupt the log is closed, and the trial is dropped."""
        error = row["error"]["types"][0] if "error" in row else None
        with self.lock:
            if not self.log.closed:
                self.log.append(row)
                self.ran += 1
                self.incomplete += is_incomplete(row, case)
                if error is None or is_incomplete(row, case):    # a rejected input says nothing of the server
                    self.failures = self.failures + 1 if error in SERVER_FAILURES else 0


    def warm_up(self):
        """Have the server load the system's model, waiting for it as for a trial."""
        away = (harness.Unavailable, harness.Busy)
        patiently(lambda: harness.ask(self.system, "warm_up"), away, self.patience_s, self.pause)

    def finish(self):
        """End the run: what is in flight is dropped, and the log is put on the disk."""
        self.stopping.set()
        with self.lock:
            if not self.log.closed:
                self.log.finish()


def patiently(ask, waited_for, patience_s, pause):
    """Return (what ask() returns, pauses made, seconds paused), asking again while it raises `waited_for`.

    `pause(seconds)` waits, and returns False to give up: then (None, ...) is returned. Raises RunError once the
    patience is spent.
    """
    waits, since, waited_s = 0, None, 0.0
    while True:
        try:
            return ask(), waits, waited_s
        except waited_for as away:
            since = since or time.monotonic()
            left = since + patience_s - time.monotonic()
            if left <= 0:
                raise RunError(f"{away} (kept trying for {patience_s:g} s; the same command resumes)") from None
            seconds = min(left, pause_before_retry(away, waits))
        started = time.monotonic()
        if not pause(seconds):
            return None, waits, waited_s
        waits, waited_s = waits + 1, waited_s + time.monotonic() - started


def pause_before_retry(away, waits):
    """Return the seconds to wait before asking a server again: what it asked for, else 1, 2, 4, ... up to 30."""
    asked = getattr(away, "retry_after_s", None)
    if not isinstance(asked, (int, float)):
        return min(2 ** waits, LONGEST_PAUSE_S)
    return min(max(asked, SHORTEST_PAUSE_S), LONGEST_RETRY_AFTER_S)


def is_incomplete(row, case):
    """True if a trial of the case ended with an error that the case does not expect."""
    return "error" in row and row["error"]["types"][0] != case.get("expected_error")


def progress(runs):
    """Return a line on how far the runs are: done of planned, rate, time left, incomplete so far."""
    count, planned = sum(run.log.count for run in runs), sum(run.planned for run in runs)
    rate = sum(run.ran for run in runs) / (time.monotonic() - runs[0].began_at)
    left = round((planned - count) / rate) if rate else 0
    return f"{count} of {planned} trials, {rate:.2f} a second, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left, " \
           f"{sum(run.incomplete for run in runs)} incomplete so far"


def rewrite_line(text):
    """Put a text in place of the line that standard error's terminal shows."""
    columns = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1    # a new terminal may say 0
    print("\r" + text[:columns].ljust(columns), end="\r", file=sys.stderr, flush=True)


def turns(runs, case_set):
    """Yield (run, its next trials to run). A single run has one turn. Several take turns: for each trial number each
    runs all its cases, in an order of the runs that is shuffled anew, so that time of day, heat and load fall on all
    alike."""
    import random
    if len(runs) == 1:
        yield runs[0], missing_trials(runs[0].log, case_set, runs[0].log.numbers)
        return
    for trial in runs[0].log.numbers:
        for run in random.Random(harness.SEED_BASE + trial).sample(runs, len(runs)):
            yield run, missing_trials(run.log, case_set, [trial])


def execute(runs, case_set, workers, warm_up, show):
    """Give each run its turns, calling `show` twice a second, where there is one. With `warm_up`, each of several
    systems loads its model at each turn. Raises what stopped a worker, or Interrupted."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.callback(run.finish)
        for run, todo in turns(runs, case_set):
            run.todo = todo
            if len(runs) > 1:
                if (first := next(todo, None)) is None:
                    continue
                run.todo, run.next_start = itertools.chain([first], todo), max(one.next_start for one in runs)
                if warm_up and not run.budget_spent():
                    run.warm_up()
            work_side_by_side(run, workers, show)
            if run.fault:
                raise run.fault
            if run.stopped_by_budget:
                break
        for run in runs:
            run.stopped_by_budget = run.log.count < run.planned    # the others too, whose turn did not come


def work_side_by_side(run, workers, show):
    """Have the workers do a turn of a run. Raises Interrupted, and RunError where they cannot be started."""
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(workers)]
    for thread in threads:
        try:
            thread.start()
        except RuntimeError as error:
            raise RunError(f"{workers} workers cannot be started ({error}); name fewer with --workers") from None
    for thread in threads:
        while thread.is_alive():
            if signals:
                raise Interrupted(signals[0])
            thread.join(0.5)    # with a limit, since Windows delivers no signal to a thread that just waits
            if show:
                show()


def stop_on_signals():
    """Have Ctrl-C, SIGTERM and SIGHUP raise Interrupted; one that is ignored (nohup) stays so. Return a function
    that lets them end the process as it stands, as the second one does: the log is safe."""
    import signal
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def let_them_kill():
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    def interrupt(number, frame):
        let_them_kill()
        signals.append(number)
        raise Interrupted(number)
    for number in numbers:
        signal.signal(number, interrupt)
    return let_them_kill


# --- command line -----------------------------------------------------------------------------------------

def new_header(system, case_set, task, args):
    """Return the header of a log that would begin now: what is compared on resume, then what describes."""
    import platform
    return {"bench_version": BENCH_VERSION, "harness_version": harness.HARNESS_VERSION,
            "run_id": harness.new_run_id(), "started_at": harness.now(),
            "inputs_sha256": case_set["inputs_sha256"], "case_set_sha256": case_set["sha256"],
            "system": harness.system_identity(system), **plan_of(args),
            "budget_s": args.budget_s, "workers": args.workers,
            "environment": {"python": platform.python_version(), "platform": platform.platform(),
                            "hardware": args.hardware},
            "endpoint": text_or_none(system, "endpoint"), "server": None,
            "task": {"name": task.name, "sha256": task.sha256}, "cases": case_set["file"]}


def open_log(path, header, case_set, make_ready, old=None):
    """Return the log at `path`, begun or resumed, locked, with all its trials read and checked.

    make_ready(), which returns the server's name and version, is called before a new log is begun or an old one is
    to be added to; the line of the resume is then the log's `next_session`. A new log begins with the trials of the
    log `old`, where there is one. Raises RunError for a log that this benchmark may not continue, which stays as it
    was.
    """
    extended = old and extensible(old, path, header, case_set)
    if not os.path.exists(path):
        if not extended:
            header["server"] = make_ready()
        beginning = extension(extended, header) if extended else [harness.encode(header).decode() + "\n"]
        harness.write(path, beginning, over=False)
    log = TrialLog(path, writable=True)
    try:
        refuse_other_benchmark(path, log.header, header)
        if extended and log.header["run_id"] != extended.header["run_id"]:
            raise RunError(f"{path} is there already, and does not begin with the trials of {old}; name another --log")
        log.case_ids = planned_ids(header, case_set)
        cases = {case["id"]: case for case in case_set["cases"]}
        log.incomplete = sum(is_incomplete(row, cases[row["case_id"]]) for row in log.rows())
        if log.header["run_id"] != header["run_id"] and log.count < planned_trials(header, case_set):
            header["server"] = make_ready()
            log.next_session = {"resumed_at": harness.now()} | {key: header[key] for key in DESCRIBING}
    except BaseException:
        log.close()
        raise
    return log


def extensible(old, path, header, case_set):
    """Return the log `old`, to be read, where a run into `path` with more trials may begin with its trials. Raises
    RunError."""
    log = read_log(old, case_set)
    if os.path.exists(path) and os.path.samefile(old, path):
        raise RunError(f"--extend begins a new log and leaves {old} as it is; name another file with --log")
    refuse_other_benchmark(old, log.header | {"trials": header["trials"]}, header, "this run")
    if log.header["trials"] >= header["trials"]:
        raise RunError(f"{old} has {log.header['trials']} trials of each case already; name more with --trials")
    return log


def extension(old, header):
    """Yield the lines of the log that a run with the trials of `header` would have left where `old` stands: its own,
    under a header with more trials."""
    yield harness.encode(old.header | {"trials": header["trials"]}).decode() + "\n"
    start = old.end
    for _ in old.rows():    # each is checked
        pass
    with open(old.path, "rb") as file:
        file.seek(start)
        while file.tell() < old.end:
            yield file.readline().decode("utf-8").rstrip("\n") + "\n"


def make_ready(system, patience_s, warm_up):
    """Let the system look whether its model is there, and load it; return its server's name and version.

    A server that is busy loading is waited for; one that cannot be reached is an error at once.
    """
    for step in ("check_model", "warm_up") if warm_up else ("check_model",):
        waited_for(lambda: harness.ask(system, step), patience_s)
    return text_or_none(system, "server")


def text_or_none(system, name):
    """Return an attribute that describes a system's server. Raises RunError where it is no text."""
    value = getattr(system, name, None)
    if not (value is None or isinstance(value, str)):
        raise RunError(f"the system's `{name}` is {type(value).__name__}, not a text")
    return value


def waited_for(ask, patience_s):
    """Return what ask() returns, asking again while it raises Busy: before the first trial that is waited for too."""
    return patiently(ask, harness.Busy, patience_s, lambda seconds: time.sleep(seconds) or True)[0]


def default_log(system, folder=None, shard=None):
    """Return where the log of a system (or of its shard I/N) lies unless told otherwise. Raises RunError where it has
    no name."""
    name = getattr(system, "name", None)
    if not isinstance(name, str):
        raise RunError("the system has no `name`")
    name = re.sub(r"[^a-z0-9.-]", "-", name) + (f".shard-{shard.replace('/', '-of-')}" if shard else "")
    return os.path.join(folder or harness.RUNS, name + ".jsonl")


def logs_to_convert(args, log):
    """Return the logs that --convert puts together: those named, else the default one, else those of its shards."""
    import glob
    return args.log or ([log] if os.path.exists(log) else sorted(glob.glob(
        glob.escape(log.removesuffix(".jsonl")) + ".shard-*-of-*.jsonl"))) or [log]


def add_regrade_option(parser):
    """Add --regrade, which the scripts that read logs for grading take."""
    parser.add_argument("--regrade", action="store_true",
                        help="accept a log of the same inputs as the case set but of other answers or criteria")


def convert(paths, case_set, args):
    """Write a log, or the logs of shards, as a recording."""
    out = args.convert
    harness.refuse_inputs([out], [*paths, args.cases])
    recording = to_recording(paths[0], case_set, args.regrade, paths[1:])
    harness.write(out, harness.json_chunks(recording, "results"))
    missing = sum(map(harness.is_not_run, recording["results"]))
    print(f"{out}: {len(recording['results'])} trials, {missing} of them not run"
          + (f", from {len(paths)} logs of shards" if len(paths) > 1 else "")
          + (", to be graded with other answers than it was made with" if recording["regraded_from"] else ""))
    return 0


def dry_run(system, case_set, path, header, old=None):
    """Print what a run would do, and the first request's body where the system can tell it. Nothing is changed."""
    log = extensible(old, path, header, case_set) if old else None
    if os.path.exists(path):
        log = TrialLog(path)
        refuse_other_benchmark(path, log.header, header)
        log.case_ids = planned_ids(header, case_set)
    planned, logged = planned_trials(header, case_set), sum(1 for _ in log.rows()) if log else 0
    cases = harness.in_splits(case_set, header["splits"])
    todo = ((case, trial) for trial in planned_numbers(header) for case in cases
            if not (log and trial < log.header["trials"] and log.holds(case["id"], trial)))
    print(f"{harness.printable(system.name)}: planned {planned}, already logged {logged}, to run {planned - logged}; "
          f"log {path}")
    for case, trial in todo if hasattr(system, "request") else ():
        try:
            print(json.dumps(system.request(case, trial), ensure_ascii=False, indent=1))
            break
        except ValueError:    # an input that no model is asked about
            continue
    return 0


def run_benchmark(systems, paths, case_set, task, args):
    """Run what the logs lack, print the counts line of each system and return the exit status."""
    logs = []
    try:
        for system, path in zip(systems, paths):
            logs.append(ready_log(system, path, case_set, task, args))
        for log in logs:
            if log.next_session:
                log.append(log.next_session)
    except BaseException as fault:
        for log in logs:
            log.close()
        if isinstance(fault, Interrupted):    # while a log was read or a model loaded
            for system, path in zip(systems, paths):
                log = read_log(path, case_set) if os.path.exists(path) else None
                print_counts(system, planned_trials(plan_of(args), case_set), sum(1 for _ in log.rows()) if log else 0, 0)
            say_how_to_resume(paths)
        raise
    began_at, planned = time.monotonic(), planned_trials(plan_of(args), case_set)
    runs = [Run(system, log, planned, began_at, args.budget_s, args.patience_s, args.request_delay_s)
            for system, log in zip(systems, logs)]
    incomplete = sum(run.incomplete for run in runs)
    shown = sys.stderr and sys.stderr.isatty() and not args.quiet
    try:
        execute(runs, case_set, args.workers, args.warmup, (lambda: rewrite_line(progress(runs))) if shown else None)
    except Interrupted:
        say_how_to_resume(paths)
        raise
    finally:
        if shown:
            rewrite_line("")
        for run in runs:
            print_counts(run.system, planned, run.logged, run.ran,
                         " (stopped by the time budget)" if run.stopped_by_budget else "")
    for run in runs:
        if run.logged == planned:
            print(f"nothing to run: {run.log.path} holds every planned trial", file=sys.stderr)
    if sum(run.ran for run in runs) == sum(run.incomplete for run in runs) - incomplete > 0:
        print("note: every trial of this run is incomplete; `report.py --failures` shows why, and a system that is "
              "corrected wants another --log", file=sys.stderr)
    return 0


def plan_of(args):
    """Return what a header says of the plan that the command line asks for."""
    return {"splits": ["development"], "trials": args.trials, "shard": args.shard}


def ready_log(system, path, case_set, task, args):
    """Return the log of a system, ready to be added to; or just read, where it is finished and the server is away."""
    try:
        header = waited_for(lambda: new_header(system, case_set, task, args), args.patience_s)
        return open_log(path, header, case_set, lambda: make_ready(system, args.patience_s, args.warmup), args.extend)
    except harness.Unavailable:
        if log := finished_without_its_server(path, system, case_set, plan_of(args)):
            return log
        raise


def finished_without_its_server(path, system, case_set, plan):
    """Return the log, read, if it holds every planned trial and is this system's in all that can be told without its
    server, which some systems need to find out which model they are; else None."""
    if not os.path.exists(path):
        return None
    log = read_log(path, case_set)
    known = [key for key in harness.IDENTITY if key != "model"]
    same = all(log.header[key] == value for key, value in plan.items()) \
        and all(log.header["system"][key] == getattr(system, key) for key in known)
    return log if same and sum(1 for _ in log.rows()) == planned_trials(plan, case_set) else None


def print_counts(system, planned, logged, ran, note=""):
    """Print the one line on standard output."""
    print(harness.printable(system.name) + f": planned {planned}, already logged {logged}, ran {ran}, "
          f"not run {planned - logged - ran}" + note, flush=True)


def say_how_to_resume(paths):
    """Tell, after a signal, how to go on."""
    print(f"interrupted; the same command resumes {', '.join(map(str, paths))}", file=sys.stderr)


def shard(text):
    """An argparse type: a shard, I/N."""
    try:
        shard_numbers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def json_object(text):
    """An argparse type: a JSON object."""
    try:
        if isinstance(value := harness.parse_json(text), dict):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")


def add_model_options(parser):
    """Add what a factory (module:attribute=MODEL) takes. All but the endpoint and the timeout shape the draw, and
    so are part of the system's identity."""
    group = parser.add_argument_group("for systems that ask a server")
    group.add_argument("--endpoint", metavar="URL", help="where the server is")
    group.add_argument("--timeout-s", type=harness.number_from(0.001, float, 86400), metavar="S",
                       help="bound on a whole call (default: 120)")
    group.add_argument("--temperature", type=harness.number_from(0, float), metavar="T", help="default: 1")
    group.add_argument("--max-tokens", type=harness.number_from(1, int), metavar="N", help="default: 64")
    group.add_argument("--top-p", type=harness.number_from(0, float, 1), metavar="P", help="default: the server's own")
    group.add_argument("--format", choices=("schema", "json", "none"),
                       help="how the reply's form is asked for (default: schema); none for servers that refuse one")
    group.add_argument("--think", choices=("on", "off"), help="thinking, on Ollama (default: off)")
    group.add_argument("--extra-body", type=json_object, metavar="JSON", help="an object merged into each request")


def main(argv=None):
    """Run, resume, convert or plan, and return the exit status."""
    parser = harness.command_line("Run every case many times, log each trial as it ends, resume.")
    parser.add_argument("--system", action="append", metavar="MODULE:ATTRIBUTE[=MODEL]",
                        help=f"what answers the trials (default: {DEFAULT_SYSTEM}); several take turns")
    parser.add_argument("--trials", type=harness.number_from(1, int, harness.MAX_TRIALS), default=10, metavar="N",
                        help="trials of each case (default: %(default)s)")
    parser.add_argument("--log", type=harness.file_name, action="append", metavar="F",
                        help="the trial log (default: runs/NAME.jsonl beside the scripts); with --convert, one of "
                             "each shard")
    parser.add_argument("--log-dir", metavar="DIR", help="where the logs go (default: runs/ beside the scripts)")
    parser.add_argument("--shard", type=shard, metavar="I/N",
                        help="run only the trial numbers t with t mod N = I - 1, into a log of its own")
    parser.add_argument("--extend", type=harness.file_name, metavar="OLD",
                        help="begin a new log with the trials of a log that has fewer --trials")
    parser.add_argument("--budget-s", type=harness.number_from(0, float, 1e8), metavar="S",
                        help="start no new trial after S seconds")
    parser.add_argument("--patience-s", type=harness.number_from(0, float, 1e8), default=120, metavar="S",
                        help="how long to keep trying a server that went away or is busy (default: %(default)s)")
    parser.add_argument("--workers", type=harness.number_from(1, int, 1000), default=1, metavar="N",
                        help="calls in flight at a time (default: %(default)s)")
    parser.add_argument("--request-delay-s", type=harness.number_from(0, float, 1e8), default=0, metavar="S",
                        help="start requests at least S seconds apart")
    parser.add_argument("--no-warmup", dest="warmup", action="store_false", help="do not load the model before trial 0")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the first request; run nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--hardware", metavar="TEXT", help="what the model runs on, for the log's header")
    parser.add_argument("--convert", type=harness.output_file, metavar="RECORDING",
                        help="run nothing; write the log as a recording")
    harness.add_benchmark_options(parser)
    add_regrade_option(parser)
    add_model_options(parser)
    args = parser.parse_args(argv)
    args.system = args.system or [DEFAULT_SYSTEM]
    several = len(args.system) > 1
    for wrong, why in ((args.regrade and not args.convert,
                        "--regrade goes with --convert: a run is never continued with another case set"),
                       (args.log and (args.log_dir or several), "several systems have a log each: name their --log-dir"
                        if several else "--log and --log-dir do not go together"),
                       (len(args.log or ()) > 1 and not args.convert, "a run has one --log"),
                       (several and (args.convert or args.extend), "--convert and --extend go with one --system"),
                       (args.convert and args.extend, "--convert makes a recording, and --extend a log")):
        if wrong:
            parser.error(why)
    let_signals_kill = stop_on_signals()
    try:
        return carry_out(args)
    except Interrupted as signal:
        return 128 + signal.args[0]
    finally:
        let_signals_kill()


def carry_out(args):
    """Do what the command line asks for, and return the exit status. Raises Interrupted where a signal came."""
    task = harness.load_task(args.task)
    case_set = harness.load_cases(args.cases, task)
    if args.convert and args.log:
        return convert(args.log, case_set, args)
    options = {name: value for name in MODEL_OPTIONS if (value := getattr(args, name)) is not None}
    systems = [harness.load_system(spec, **options) for spec in args.system]
    paths = args.log or [default_log(system, args.log_dir, args.shard) for system in systems]
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise RunError(f"two of the systems would share a log ({', '.join(paths)}); run them one after the other, "
                       "each with a --log of its own")
    if args.convert:
        return convert(logs_to_convert(args, paths[0]), case_set, args)
    try:
        if args.dry_run:
            for system, path in zip(systems, paths):
                dry_run(system, case_set, path, new_header(system, case_set, task, args), args.extend)
            return 0
        return run_benchmark(systems, paths, case_set, task, args)
    except Interrupted:    # a system may be what hangs: none is asked to close
        systems = []
        raise
    finally:
        for system in systems:
            harness.ask(system, "close")


if __name__ == "__main__":
    sys.exit(harness.run_command(main))
