#!/usr/bin/env python3
"""The evaluation harness: case sets, tasks, systems, one call, recordings, grading and run records.

It knows no task and no model. A task module offers CHECKS; a system has `respond(case, trial)`.

    python3 harness.py check                              validate the case set and prove its checks
    python3 harness.py record --out recording.json        record a quick system, everything in memory
    python3 harness.py run --recording recording.json --out run.json      grade a recording
"""
import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from array import array
from collections import namedtuple

# What is slow to import (hashlib, datetime, copy) is imported where it is needed, so that --help is quick.

HARNESS_VERSION = "1"
HERE = os.path.dirname(os.path.realpath(__file__))
RUNS = os.path.join(HERE, "runs")
SPLITS = ("development", "held-out")
VERDICTS = ("pass", "fail", "incomplete")
IDENTITY = ("name", "version", "mode", "model", "prompt", "tools", "sampling")
RUN_DESCRIPTION_FIELDS = ("graded_at", "python", "platform")
CASE_KEYS = {"id", "class", "split", "input", "expected", "expected_error", "failure_criteria", "critical"}
SEED_BASE = 1000
MAX_TRIALS = 1_000_000    # of one case
MAX_NESTING = 500    # of an output; deeper ones are refused, so that what one Python writes every Python can read
FILE_NESTING = MAX_NESTING + 10    # of a file, which holds outputs a few levels down
LOG_BEGINNING = b'{"bench_version":'
MAX_TEXT = 4000      # characters kept of an error's message, and of a reply that could not be used

Answer = namedtuple("Answer", "output metadata")
Task = namedtuple("Task", "name sha256 checks")


# --- errors -----------------------------------------------------------------------------------------------

class RunError(Exception):
    """Work cannot go on. The message is a sentence for the user: what is wrong, where, what to do."""


class CaseError(RunError):
    """A case set is not valid. The message names the file, the case and the fault."""


class Unavailable(Exception):
    """The model was not asked, since its server cannot be reached or will not serve it. Not a result."""


class Busy(Exception):
    """The model was not asked yet: its server wants to be asked later (in `retry_after_s`, if it says)."""

    def __init__(self, message, retry_after_s=None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnloggableOutput(Exception):
    """A system returned what is not a JSON value, or would not read back equal."""


# --- JSON and files ---------------------------------------------------------------------------------------

def encode(value, sort_keys=False):
    """Return `value` as compact JSON (RFC 8259) in UTF-8 bytes, without a line break.

    A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape: the two look the same.
    Raises TypeError, ValueError or RecursionError where `value` is not a JSON value.
    """
    return (_CANONICAL if sort_keys else _COMPACT).encode(value).encode("utf-8", "backslashreplace")


_COMPACT, _CANONICAL = (json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, sort_keys=sort_keys,
                                         separators=(",", ":"))    # a circle shows as endless depth
                        for sort_keys in (False, True))


def sha256_json(value):
    """Return the hex SHA-256 of the canonical JSON of `value`: sorted keys, no spaces, UTF-8."""
    import hashlib
    return hashlib.sha256(encode(value, sort_keys=True)).hexdigest()


def _finite(digits):
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:40]} is beyond the range of a number")
    return number


def _not_json(word):
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_not_json)


def _nested_deeper(value, limit):
    """True if `value` has more than `limit` levels of lists and objects (no recursion, so any depth is safe)."""
    level = [value]
    for _ in range(limit):
        level = [item for value in level if isinstance(value, (dict, list))
                 for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return False
    return any(isinstance(value, (dict, list)) for value in level)


def parse_json(text, nesting=MAX_NESTING):
    """Return the value of a JSON text (str), by RFC 8259 alone, with at most `nesting` levels.

    Raises json.JSONDecodeError for anything else, NaN and what Python itself cannot hold included. (Its own
    reader raises a plain ValueError for an integer of too many digits, which must not pass for a rejection.)
    """
    try:
        text = text.strip(" \t\n\r")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise json.JSONDecodeError("more than one value", "", end)
        if end > nesting and text.count("[") + text.count("{") > nesting and _nested_deeper(value, nesting):
            raise ValueError(f"nested more than {nesting} levels deep")
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    return value


def parse_lines(lines):
    """Return the values of some lines of JSON (bytes), or None unless each of them is one. It is faster than to read
    them one by one, which tells what is wrong with them."""
    if any(len(line) > FILE_NESTING and line.count(b"[") + line.count(b"{") > FILE_NESTING for line in lines):
        return None    # one may be nested too deeply
    try:
        text = "[" + b",".join(lines).decode("utf-8") + "]"
        values, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return values if end == len(text) and len(values) == len(lines) else None


def read_json(path, error=RunError):
    """Return the value of a JSON file. Raises `error`, naming the file, where it cannot be read or is not JSON."""
    try:
        with open(path, "rb") as file:
            return parse_json(file.read().decode("utf-8-sig"), FILE_NESTING)
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None
    except ValueError as fault:
        if is_log(path):
            raise error(f"{path} is a trial log: report.py reads it as it is, and bench.py --convert makes a recording "
                        "of it") from None
        raise error(f"{path} is not JSON in UTF-8: {fault}") from None


def write(path, chunks, over=True):
    """Write a whole file or nothing: the strings go to a file beside it, which then takes its place.

    Its folder is made where it is missing. With `over` false, a file that is there already stays as it is.
    Raises RunError, naming the file, where it cannot be written, and where a trial log would be written over.
    """
    try:
        if over and os.path.isfile(path) and is_log(path):
            raise RunError(f"{path} is a trial log, the original record; name another file to write")
        if os.path.exists(path) and not os.path.isfile(path):    # /dev/stdout, a pipe: written to, never replaced
            with open(path, "w", encoding="utf-8", newline="\n", errors="backslashreplace") as file:
                file.writelines(chunks)
        else:
            _write_beside(os.path.realpath(path), chunks, os.replace if over else _link)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def is_log(path):
    """True if a file is named or begins as a trial log does."""
    with open(path, "rb") as file:
        return str(path).endswith(".jsonl") or file.read(len(LOG_BEGINNING)) == LOG_BEGINNING


def _write_beside(path, chunks, put_in_place):
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    beside = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8", newline="\n", errors="backslashreplace") as file:
            if os.path.exists(path):
                os.chmod(beside, os.stat(path).st_mode)
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(beside, path)
    finally:
        if os.path.exists(beside):
            os.unlink(beside)
    if os.name == "posix":    # the name, too, survives a power cut
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _link(beside, path):
    """Give a file the name `path` unless that is taken."""
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError:    # a file system without hard links
        if not os.path.exists(path):
            os.replace(beside, path)


def json_chunks(document, rows_key):
    """Yield a JSON object in pieces: its keys one a line, and each row of the list at `rows_key` on a line of
    its own, so that a large file streams and two of them compare line by line."""
    yield "{\n"
    for key, value in document.items():
        if key != rows_key:
            yield f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)},\n"
    yield f"{json.dumps(rows_key)}: [\n"
    for number, row in enumerate(document[rows_key]):
        yield (",\n" if number else "") + json.dumps(row, ensure_ascii=False, allow_nan=False)
    yield "\n]}\n"


def now():
    """Return the time in UTC, ISO 8601, to the millisecond."""
    from datetime import datetime, timezone
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def seconds(time_text):
    """Return a time in ISO 8601 in seconds since 1970. Raises ValueError for any other text."""
    from datetime import datetime
    return datetime.fromisoformat(time_text).timestamp()


# --- tasks, case sets and systems -------------------------------------------------------------------------

def import_module(name):
    """Import a module from the current directory, then from beside this file. Raises RunError."""
    import importlib
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise RunError(f"module {name} needs {error.name}, which is not installed") from None
        places = here if here == HERE else f"{here} or {HERE}"
        raise RunError(f"there is no module {name} in {places}") from None
    except (Exception, SystemExit) as error:
        raise RunError(f"module {name} cannot be imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(here)
        sys.path.append(here)    # for what the module imports later, behind everything else


def load_task(name):
    """Return the Task (name, sha256 of its source, checks) of a task module. Raises RunError."""
    module = import_module(name)
    checks = getattr(module, "CHECKS", None)
    if not (isinstance(checks, tuple) and checks and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1])
            for pair in checks)):
        raise RunError(f"task {name} needs CHECKS, a tuple of (name, check) pairs")
    # Line ends made alike, so that a checkout with Windows line ends has the same digest.
    import hashlib
    with open(module.__file__, "rb") as file:
        source = file.read().replace(b"\r\n", b"\n")
    return Task(name, hashlib.sha256(source).hexdigest(), checks)


def load_cases(path, task):
    """Return the case set in `path`: a dict of `name`, `cases`, `file`, `sha256` (over all of it) and
    `inputs_sha256` (over what a model can see of it: ids, inputs, splits and order).

    Raises CaseError naming the file, the case and the fault; an expected answer that the task's own checks
    reject is one.
    """
    data = read_json(path, CaseError)
    if not (isinstance(data, dict) and set(data) == {"name", "cases"} and isinstance(data["name"], str)
            and isinstance(data["cases"], list) and data["cases"]):
        raise CaseError(f'{path}: a case set is {{"name": ..., "cases": [...]}} with at least one case')
    seen = set()
    for number, case in enumerate(data["cases"], 1):
        fault = case_fault(case, seen, task.checks)
        if fault:
            named = case.get("id") if isinstance(case, dict) else None
            raise CaseError(f"{path}: case {number} ({named!r}): {fault}")
        seen.add(case["id"])
    visible = [[case["id"], case["input"], case["split"]] for case in data["cases"]]
    return {**data, "file": os.path.basename(path), "sha256": sha256_json(data), "inputs_sha256": sha256_json(visible)}


def case_fault(case, seen, checks):
    """Return what is wrong with one case of a case set, or None. `seen` holds the ids before it."""
    if not isinstance(case, dict):
        return "a case is an object"
    if unknown := sorted(set(case) - CASE_KEYS):
        return f"unknown key {unknown[0]!r} (a misspelling?)"
    if missing := sorted({"id", "class", "split", "input"} - set(case)):
        return f"the key {missing[0]!r} is missing"
    if not (isinstance(case["id"], str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case["id"])):
        return "an id is words of a-z and 0-9 joined by single hyphens"
    if case["id"] in seen:
        return "an earlier case has the same id"
    if not (isinstance(case["class"], str) and case["class"].strip()):
        return "`class` must be a word or more"
    if case["split"] not in SPLITS:
        return f"unknown split {case['split']!r}; a split is {' or '.join(SPLITS)}"
    if ("expected" in case) == ("expected_error" in case):
        return "exactly one of `expected` and `expected_error` must be given"
    if not isinstance(case.get("critical", True), bool):
        return "`critical` must be true or false"
    criteria = case.get("failure_criteria", [])
    if not (isinstance(criteria, list) and all(
            isinstance(item, dict) and set(item) == {"field", "equals", "why"} and isinstance(item["field"], str)
            and isinstance(item["why"], str) for item in criteria)):
        return '`failure_criteria` is a list of {"field", "equals", "why"}'
    if "expected_error" in case:
        wanted = case["expected_error"]
        return None if isinstance(wanted, str) and wanted.isidentifier() else "`expected_error` is a class name"
    if not isinstance(case["expected"], dict):
        return "`expected` must be an object"
    verdict, check, reason = grade(case, 0, {"output": case["expected"]}, checks)
    return None if verdict == "pass" else f"its own expected answer fails the check {check}: {reason}"


@contextlib.contextmanager
def blamed(what):
    """Raise RunError, which begins with `what`, in place of any exception that is no Unavailable, Busy or RunError."""
    try:
        yield
    except (RunError, Unavailable, Busy):
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{what} {type(error).__name__}: {error}") from None


def load_system(spec, **options):
    """Return the system that `module:attribute` or `module:attribute=MODEL` names.

    With =MODEL the attribute is a factory, called with the model and the options. A system without it is fixed:
    only the attributes that its `settable` names (where it is reached, how patiently) can be set. Raises RunError.
    """
    named, is_factory, model = spec.partition("=")
    module_name, _, attribute = named.partition(":")
    if not (module_name and attribute) or (is_factory and not model):
        raise RunError(f"system {spec!r} is not named as module:attribute or module:attribute=MODEL")
    module = import_module(module_name)
    if not hasattr(module, attribute):
        raise RunError(f"module {module_name} ({module.__file__}) has no {attribute}")
    system = getattr(module, attribute)
    if is_factory:
        with blamed(f"system {spec} cannot be made with these options:"):
            system = system(model, **options)
    elif hasattr(system, "respond"):
        for name, value in options.items():
            if name not in getattr(system, "settable", ()):
                raise RunError(f"system {spec} takes no --{name.replace('_', '-')}")
            setattr(system, name, value)
    if not hasattr(system, "respond"):
        raise RunError(f"system {spec} has no respond(case, trial)"
                       + (f"; name a model: {spec}=MODEL" if callable(system) else ""))
    return system


def system_identity(system):
    """Return the dict of what makes a system that system (IDENTITY). Raises RunError where it is incomplete."""
    with blamed("the system cannot be identified:"):
        try:
            identity = {key: getattr(system, key) for key in IDENTITY}    # which may look the model up on its server
        except AttributeError as error:
            raise RunError(f"the system is incomplete: {error}") from None
    if fault := identity_fault(identity):
        raise RunError(f"the system's {fault}")
    try:
        if parse_json(encode(identity).decode("utf-8")) != identity:
            raise ValueError("it would not read back equal")
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"the identity of system {identity['name']} is not JSON: {error}") from None
    return identity


def identity_fault(identity):
    """Return what is wrong with a system's identity, or None."""
    fault = kind_fault(identity, dict(zip(IDENTITY, (str, str, str, str, dict, list, dict))))
    return fault or (None if identity["name"].strip() else "`name` must be a word or more")


def in_splits(case_set, splits, include_held_out=False):
    """Return the cases of these splits, in the case set's order. Raises RunError for an unknown split, for
    none, and for the held-out one unless it is asked for: it guards against tuning to the test."""
    for split in splits:
        if split not in SPLITS:
            raise RunError(f"unknown split {split!r}; a split is {' or '.join(SPLITS)}")
    if "held-out" in splits and not include_held_out:
        raise RunError("the held-out split is not run: it guards against tuning to the test")
    cases = [case for case in case_set["cases"] if case["split"] in splits]
    if not cases:
        raise RunError(f"{case_set['file']} has no case in the splits {', '.join(splits) or '(none)'}")
    return cases


def plan(case_set, splits, trials, include_held_out=False):
    """Return an iterator over (case, trial) in trial-major order, so that a run that stops has run every case
    equally often, plus or minus one. Raises RunError as `in_splits` does, and for fewer trials than one."""
    cases = in_splits(case_set, splits, include_held_out)
    if not 1 <= trials <= MAX_TRIALS:
        raise RunError(f"{trials} trials: a plan has 1 to {MAX_TRIALS} of each case")
    return ((case, trial) for trial in range(trials) for case in cases)


# --- one trial --------------------------------------------------------------------------------------------

def seed_of(system, trial):
    """Return the seed of a trial: the same for every case and, unless a system says otherwise, every model."""
    seed = ask(system, "seed_for", trial)
    if not (seed is None or type(seed) is int):
        raise RunError(f"seed_for of system {system.name} returned {type(seed).__name__}, not an int")
    return SEED_BASE + trial if seed is None else seed


def call(system, case, trial):
    """Ask the system once; return (output, metadata, latency in seconds).

    Raises what `respond` raises, and RunError where it returns no Answer.
    """
    import pickle    # three times as fast as copy.deepcopy
    own_case = pickle.loads(pickle.dumps(case))    # a copy, which it may change without changing the next trial's
    started = time.perf_counter()
    answer = system.respond(own_case, trial)
    latency_s = time.perf_counter() - started
    if not isinstance(answer, Answer):
        raise RunError(f"system {system.name} returned {type(answer).__name__}, not an Answer, "
                       f"for case {case['id']}, trial {trial}")
    return answer.output, answer.metadata, latency_s


def ask(system, method, *args):
    """Return what an optional method of a system returns, or None where it has no such method.

    Raises RunError in place of any exception that is no Unavailable, Busy or RunError.
    """
    with blamed(f"{method} of system {getattr(system, 'name', 'without a name')} raised"):
        return getattr(system, method)(*args) if hasattr(system, method) else None


def error_types(error):
    """Return the class names of an exception, its own first, then those it is derived from, up to Exception."""
    kinds = type(error).__mro__
    return [kind.__name__ for kind in kinds if issubclass(kind, BaseException) and kind is not BaseException]


def attempt(system, case, trial):
    """Run one trial; return its result: a dict of `output` or `error`, `metadata` and `latency_s`.

    An error is a dict of `types` and `message`, and `text` where a reply was received that could not be used.
    Raises Unavailable or Busy where the model was not asked, and RunError where `respond` returns no Answer.
    """
    started = time.perf_counter()
    try:
        output, metadata, latency_s = call(system, case, trial)
    except (Unavailable, Busy, RunError, KeyboardInterrupt):
        raise
    except BaseException as error:    # a system that calls sys.exit() has not answered either
        return failed(error, time.perf_counter() - started, system, trial)
    return loggable({"output": output, "metadata": metadata, "latency_s": round(latency_s, 6)}, system, trial)


def failed(error, latency_s, system, trial):
    """Return the result of a trial that raised `error`, with the seed, so that the trial can be run again alone."""
    if type(error).__name__ == "NotRun":    # the word for a trial that the log lacks
        error = UnloggableOutput(f"the system raised an exception of the reserved name NotRun: {error}")
    described, seed = {"types": error_types(error), "message": _readable_back(error)}, {"seed": seed_of(system, trial)}
    try:
        text, metadata = getattr(error, "text", None), getattr(error, "metadata", None)
    except Exception:    # a property of the system's own that fails
        text = metadata = None
    if text is not None:
        described["text"] = _readable_back(text)
    result = {"error": described, "metadata": seed | metadata if isinstance(metadata, dict) else seed,
              "latency_s": round(latency_s, 6)}
    return result if _reads_back(result) is None else result | {"metadata": seed}


def _readable_back(text):
    """Return the beginning of a text as it reads back from JSON, where two halves of a character become one."""
    try:
        return json.loads(json.dumps(str(text)[:MAX_TEXT]))
    except Exception:
        return "(a message that cannot be shown)"


def loggable(result, system, trial):
    """Return the result, or one of type UnloggableOutput in its place where it would not read back equal."""
    fault = _reads_back(result)
    if fault is None:
        return result
    return failed(UnloggableOutput(f"what the system returned cannot be logged: {fault}"), result["latency_s"],
                  system, trial)


def _reads_back(result):
    """Return None if a result would read back equal from the log, else why it would not."""
    try:
        if not isinstance(result["metadata"], dict):
            return "its metadata is not an object"
        if parse_json(encode(result).decode("utf-8"), MAX_NESTING + 1) == result:
            return None
        return "it would not read back equal"
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)


# --- digests of trials ------------------------------------------------------------------------------------

class TrialDigest:
    """A digest over trials that come in any order: the SHA-256 of each trial's own 32-byte SHA-256 (over its
    canonical JSON), laid in order of trial, then case id."""

    def __init__(self, trials):
        from hashlib import sha256
        self.trials, self.sha256 = trials, sha256
        self.places = {}    # case id -> the number that stands for it in `cases`
        self.cases, self.numbers, self.digests = array("i"), array("i"), bytearray()    # of each trial, as they came

    def add(self, value):
        """Add a trial: a dict of `case_id`, `trial` and what else counts."""
        self.cases.append(self.places.setdefault(value["case_id"], len(self.places)))
        self.numbers.append(value["trial"])
        self.digests += self.sha256(encode(value, sort_keys=True)).digest()

    def merge(self, other):
        """Add the trials of another digest."""
        places = [self.places.setdefault(case_id, len(self.places)) for case_id in other.places]
        self.cases.extend(places[place] for place in other.cases)
        self.numbers.extend(other.numbers)
        self.digests.extend(other.digests)

    def hexdigest(self):
        """Return the digest of all trials that were added."""
        whole, width = self.sha256(), len(self.places)
        ranked = {case_id: rank for rank, case_id in enumerate(sorted(self.places))}
        ranks = [ranked[case_id] for case_id in self.places]
        in_order = array("i", [-1]) * (width * self.trials)
        for came, (place, trial) in enumerate(zip(self.cases, self.numbers)):
            in_order[trial * width + ranks[place]] = came
        for came in in_order:
            if came >= 0:
                whole.update(self.digests[32 * came:32 * came + 32])
        return whole.hexdigest()


def recorded(row):
    """Return what a recording holds of a trial: the input of `recording_sha256`."""
    held = "error" if "error" in row else "output"
    return {"case_id": row["case_id"], "trial": row["trial"], held: row[held], "metadata": row["metadata"],
            "latency_s": row["latency_s"]}


def not_run(case_id, trial):
    """Return the recorded form of a planned trial that never ran."""
    return {"case_id": case_id, "trial": trial,
            "error": {"types": ["NotRun"], "message": "this planned trial was not run"},
            "metadata": {}, "latency_s": None}


def is_not_run(row):
    """True for a planned trial that never ran."""
    return "error" in row and row["error"]["types"][0] == "NotRun"


# --- grading ----------------------------------------------------------------------------------------------

def grade(case, trial, result, checks):
    """Return (verdict, check, reason) for one trial's result (its `output` or `error`).

    Only the expected error's own class is a pass: a reply that is not JSON raises JSONDecodeError, which is
    derived from ValueError but is not the rejection of an input. Raises RunError where a check raises or
    returns what is no reason: that is a fault of the task and not of the model.
    """
    if "error" in result:
        kind = result["error"]["types"][0]
        if kind == case.get("expected_error"):
            return "pass", None, None
        return "incomplete", None, f"{kind}: {result['error']['message']}"
    if "expected_error" in case:
        return "fail", "rejection", f"an output came back where {case['expected_error']} was expected"
    for name, check in checks:
        try:
            reason = check(case, result["output"])
            if not (reason is None or isinstance(reason, str)):
                raise TypeError(f"a check returns None or a reason, not {type(reason).__name__}")
        except Exception as error:
            raise RunError(f"check {name}, case {case['id']}, trial {trial}: the check raised {type(error).__name__}: "
                           f"{error}") from None
        if reason is not None:
            return "fail", name, reason
    return "pass", None, None


def graded(case, row, run_id, checks):
    """Return a run record's result for one recorded trial."""
    verdict, check, reason = grade(case, row["trial"], row, checks)
    return {"trial_id": f"{run_id}/{case['id']}/{row['trial']}", "case_id": case["id"], "class": case["class"],
            "trial": row["trial"], "verdict": verdict, "check": check, "reason": reason,
            "output": row.get("output"), "error": row.get("error"),
            "metadata": row["metadata"] | {"recorded_latency_s": row["latency_s"]}}


def named_case_set(case_set):
    """Return a case set's name and digests."""
    return {key: case_set[key] for key in ("name", "sha256", "inputs_sha256")}


def manifest(recording, case_set, task, recording_sha256):
    """Return a run record's manifest. `recording` is a dict with `run_id`, `system`, `splits`, `trials`,
    `sessions` (when, where and on which server it was run) and `regraded_from` (the digest of the case set that
    it was made from, where that is not the one it is graded with, else None)."""
    import platform
    return {"harness_version": HARNESS_VERSION, "run_id": recording["run_id"],
            "system": recording["system"] | {"mode": "replay"},
            "task": {"name": task.name, "sha256": task.sha256},
            "case_set": named_case_set(case_set),
            "splits": recording["splits"], "trials": recording["trials"], "sessions": recording["sessions"],
            "regraded_from": recording["regraded_from"], "recording_sha256": recording_sha256,
            "graded_at": now(), "python": platform.python_version(), "platform": platform.platform()}


def of_case_set(made_from, case_set, source, regrade=None):
    """Raise RunError unless a log's header, a recording or a manifest (`made_from`) was made from this case set.

    With `regrade`, a log that has the same inputs and other answers or criteria will do: the digest of its case set
    is returned. (None says that this is no log: its log must be converted anew.)
    """
    made, ours = made_from["case_set_sha256"], case_set["sha256"]
    if made == ours:
        return None
    same_inputs = made_from["inputs_sha256"] == case_set["inputs_sha256"]
    if same_inputs and regrade:
        return made
    raise RunError(f"{source} was made from another case set ({made_from.get('cases', 'a file')}, {made[:12]}) than "
                   f"{case_set['file']} ({ours[:12]}); name its own with --cases"
                   + (", as the inputs differ" if not same_inputs else ", or grade its trials with today's answers "
                      f"with --regrade{' when its log is converted' * (regrade is None)}: the inputs are the same"))


def of_task(made_with, task, source, regrade=False):
    """Raise RunError where a log says that it was made with a task of another name."""
    if made_with["name"] != task.name and not regrade:
        raise RunError(f"{source} was made with the task {made_with['name']}, not {task.name}; name it with --task "
                       f"{made_with['name']}, or grade with {task.name} all the same with --regrade")


def grade_recording(recording, case_set, task, source):
    """Return the run record of a recording. Raises RunError where it is not a whole recording of these cases."""
    kinds = {"run_id": str, "system": dict, "case_set_sha256": str, "inputs_sha256": str, "splits": list,
             "trials": int, "sessions": list, "regraded_from": (str, type(None)), "results": list}
    if not isinstance(recording, dict) or kind_fault(recording, kinds):
        raise RunError(f"{source} is not a recording (`bench.py --convert` writes one)")
    if fault := plan_fault(recording):
        raise RunError(f"{source}: {fault}")
    of_case_set(recording, case_set, source)
    cases = {case["id"]: case for case in in_splits(case_set, recording["splits"], include_held_out=True)}
    digest, results, seen = TrialDigest(recording["trials"]), [], set()
    for number, row in enumerate(recording["results"], 1):
        fault = row_fault(row, cases, recording["trials"])
        if fault or (row["case_id"], row["trial"]) in seen:
            raise RunError(f"{source}: result {number}: {fault or 'an earlier result is of the same trial'}")
        seen.add((row["case_id"], row["trial"]))
        digest.add(recorded(row))
        results.append(graded(cases[row["case_id"]], row, recording["run_id"], task.checks))
    if len(seen) != len(cases) * recording["trials"]:
        raise RunError(f"{source} holds {len(seen)} of {len(cases) * recording['trials']} planned trials")
    return {"manifest": manifest(recording, case_set, task, digest.hexdigest()), "results": results}


def kind_fault(holder, kinds):
    """Return which key of an object is missing or of the wrong type, or None. `kinds` maps keys to their types."""
    return next((f"`{key}` is missing or of the wrong type" for key, kind in kinds.items()
                 if not isinstance(holder.get(key, ...), kind) or isinstance(holder[key], bool)), None)


def plan_fault(made_with):
    """Return what is wrong with the plan of a log's header, a recording or a manifest, or None."""
    trials, splits = made_with["trials"], made_with["splits"]
    if type(trials) is not int or not 1 <= trials <= MAX_TRIALS:
        return f"`trials` is {trials!r}"
    if not splits or [split for split in splits if split not in SPLITS]:
        return f"`splits` is {splits!r}"
    return f"`system`: {fault}" if (fault := identity_fault(made_with["system"])) else None


def row_fault(row, case_ids, trials):
    """Return what is wrong with one logged or recorded trial, or None. Without `case_ids` any case will do."""
    if not isinstance(row, dict) or not isinstance(row.get("case_id"), str):
        return "it is not a trial, which names its case"
    if case_ids is not None and row["case_id"] not in case_ids:
        return f"case {row['case_id']!r} is not in the plan"
    if type(row.get("trial")) is not int or not 0 <= row["trial"] < trials:
        return f"trial {row.get('trial')!r} is not in the plan of {trials}"
    if ("output" in row) == ("error" in row):
        return "a trial has exactly one of `output` and `error`"
    if not isinstance(row.get("metadata"), dict):
        return "`metadata` must be an object"
    if "error" in row:
        error = row["error"]
        if not (isinstance(error, dict) and isinstance(error.get("message"), str)
                and isinstance(error.get("types"), list) and error["types"]
                and all(isinstance(kind, str) for kind in error["types"])
                and isinstance(error.get("text", ""), str)):
            return "`error` is `types` (a list of class names) and `message`"
    latency_s = row.get("latency_s", "missing")
    if not (type(latency_s) in (int, float) and 0 <= latency_s < 1e9 or (latency_s is None and is_not_run(row))):
        return "`latency_s` must be a number of seconds"
    return None


def result_fault(result, case_ids, trials):
    """Return what is wrong with one result of a run record, or None."""
    if not isinstance(result, dict) or result.get("verdict") not in VERDICTS:
        return "it has no verdict"
    if missing := {"case_id", "trial", "check", "reason", "output", "error", "metadata"} - set(result):
        return f"`{sorted(missing)[0]}` is missing"
    if (result["verdict"] != "pass") != isinstance(result.get("reason"), str):
        return "a reason goes with every verdict but pass"
    if (result["verdict"] == "fail") != isinstance(result.get("check"), str):
        return "a check goes with the verdict fail alone"
    held = "output" if result.get("error") is None else "error"
    if result["verdict"] == "incomplete" and held == "output":
        return "an incomplete trial has an `error`"
    if not isinstance(result.get("metadata"), dict):
        return "`metadata` must be an object"
    row = {key: result.get(key) for key in ("case_id", "trial", held, "metadata")}
    return row_fault(row | {"latency_s": row["metadata"].get("recorded_latency_s", "missing")}, case_ids, trials)


# --- command line -----------------------------------------------------------------------------------------

def printable(text):
    """Return `text` on one line, with nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some(values, most=10):
    """Return the first of some values as text, and how many more there are."""
    texts = list(map(str, values))
    return (", ".join(texts[:most]) or "none") + (f" and {len(texts) - most} more" if len(texts) > most else "")


def run_command(main):
    """Run a script's main() and return its exit status. Known trouble becomes one line `error: ...` and a 1."""
    for stream in filter(None, (sys.stdout, sys.stderr)):    # None where it was closed
        stream.reconfigure(errors="backslashreplace")    # a console that lacks a character still shows the rest
    try:
        status = main()
        if sys.stdout:
            sys.stdout.flush()
        return status
    except (RunError, Unavailable, Busy) as error:
        message = str(error)
    except BrokenPipeError:    # the reader of our output has gone (`| head`): nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        message = f"{error.filename or 'standard output'}: {error.strerror}"
    except KeyboardInterrupt:
        return 130
    print("error:", printable(" ".join(message.split())), file=sys.stderr)
    return 1


def command_line(description):
    """Return a script's argument parser. Its help has a width of its own: argparse imports half the library to ask
    the terminal."""
    return argparse.ArgumentParser(allow_abbrev=False, description=description,
                                   formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100))


def file_name(text):
    """An argparse type: a file's name, and no folder's. An empty one is likely a shell variable that was not set."""
    if not text or text.endswith(("/", os.sep)):
        raise argparse.ArgumentTypeError(f"{text!r} is no file's name")
    return text


def output_file(text):
    """An argparse type: a file to write, which no trial log is: that is the original record."""
    if os.path.realpath(file_name(text)).endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text}: the name of a trial log; name another file to write")
    return text


def refuse_inputs(outputs, inputs):
    """Raise RunError where a file to write is one of the files that are read."""
    inputs = [path for path in inputs if path and os.path.exists(path)]
    for out in filter(None, outputs):
        if os.path.exists(out) and any(os.path.samefile(out, path) for path in inputs):
            raise RunError(f"{out} is an input; name another file to write (--out F)")


def add_benchmark_options(parser):
    """Add --task and --cases, which every script that grades takes."""
    parser.add_argument("--task", default="triage_task", metavar="MODULE",
                        help="the task module (default: %(default)s)")
    parser.add_argument("--cases", type=file_name, default=os.path.join(HERE, "cases.json"), metavar="F",
                        help="the case set (default: cases.json beside the scripts)")


def number_from(low, kind, high=math.inf):
    """Return an argparse type: a number of `kind` (int or float) from `low` to `high`, and never infinite."""
    def number(text):
        value = kind(text)
        if not (low <= value <= high and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low}" + f" to {high}" * (high < math.inf))
        return value
    number.__name__ = "whole number" if kind is int else "number"
    return number


def junk(expected):
    """Yield outputs that no check may let pass: nothing, and the expected answer with each field wrong in turn."""
    yield from ({}, "", None, [], expected | {"junk": "junk"})
    for field, right in expected.items():
        yield {key: value for key, value in expected.items() if key != field}
        flipped = [not right] if isinstance(right, bool) else []
        for wrong in [None, "", "junk", -1, [], {}, [right], *flipped]:
            if wrong != right or type(wrong) is not type(right):
                yield expected | {field: wrong}


def prove_checks(case_set, task):
    """Return how many junk outputs the checks refused. Raises RunError where one passes."""
    refused = 0
    for case in case_set["cases"]:
        for output in junk(case.get("expected", {})):
            if grade(case, 0, {"output": output}, task.checks)[0] == "pass":
                raise RunError(f"case {case['id']}: the checks of {task.name} let junk pass: {json.dumps(output)}")
            refused += 1
    return refused


def record(system, case_set, splits, trials):
    """Return the recording of a system, every planned trial run here and now and kept in memory."""
    ask(system, "check_model")
    head = {"run_id": new_run_id(), "harness_version": HARNESS_VERSION, "system": system_identity(system),
            "case_set_sha256": case_set["sha256"], "inputs_sha256": case_set["inputs_sha256"],
            "splits": splits, "trials": trials, "sessions": [], "regraded_from": None}
    return head | {"results": [recorded({"case_id": case["id"], "trial": trial} | attempt(system, case, trial))
                               for case, trial in plan(case_set, splits, trials)]}


def new_run_id():
    """Return a name for a run: its time and eight random hex digits."""
    return f"{now()[:19].replace('-', '').replace(':', '')}Z-{os.urandom(4).hex()}"


def main(argv=None):
    """Check, record or grade, and return the exit status."""
    parser = command_line("Check a case set, record a quick system, grade a recording.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="validate the case set and prove its checks")
    recorder = commands.add_parser("record", help="record a quick system, everything in memory")
    recorder.add_argument("--system", default="model_triage:embedded", metavar="MODULE:ATTRIBUTE")
    recorder.add_argument("--trials", type=number_from(1, int, MAX_TRIALS), default=10, metavar="N")
    recorder.add_argument("--out", required=True, type=output_file, metavar="F", help="the recording to write")
    runner = commands.add_parser("run", help="grade a recording")
    runner.add_argument("--recording", type=file_name, required=True, metavar="F")
    runner.add_argument("--out", required=True, type=output_file, metavar="F", help="the run record to write")
    for subparser in (check, recorder, runner):
        add_benchmark_options(subparser)
    args = parser.parse_args(argv)
    task = load_task(args.task)
    case_set = load_cases(args.cases, task)
    if args.command == "check":
        refused = prove_checks(case_set, task)
        counts = ", ".join(f"{sum(case['split'] == split for case in case_set['cases'])} {split}" for split in SPLITS)
        print(f"{case_set['file']}: {len(case_set['cases'])} cases ({counts}); every expected answer passes, "
              f"and each of {refused} junk outputs is refused")
    elif args.command == "record":
        system = load_system(args.system)
        try:
            recording = record(system, case_set, ["development"], args.trials)
        finally:
            ask(system, "close")
        write(args.out, json_chunks(recording, "results"))
        print(f"{args.out}: {len(recording['results'])} trials recorded")
    else:
        refuse_inputs([args.out], [args.recording, args.cases])
        run_record = grade_recording(read_json(args.recording), case_set, task, args.recording)
        write(args.out, json_chunks(run_record, "results"))
        verdicts = [result["verdict"] for result in run_record["results"]]
        print(f"{args.out}: {len(verdicts)} trials graded: "
              + ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
              + (", with other answers than it was made with" if run_record["manifest"]["regraded_from"] else ""))
    return 0


if __name__ == "__main__":
    sys.modules["harness"] = sys.modules[__name__]    # what systems import, so that there is one Answer and not two
    sys.exit(run_command(main))
