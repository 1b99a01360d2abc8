"""The tests: python3 -m unittest. No model, no network beyond this machine, nothing left behind."""
import contextlib
import gzip
import html
import html.parser
import hashlib
import http.server
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from fractions import Fraction
from pathlib import Path

import bench
import harness
import model_triage
import outputs_digest
import report
import triage_task

HERE = Path(__file__).resolve().parent
SCRIPTS = ["bench.py", "report.py", "harness.py", "model_triage.py", "triage_task.py", "outputs_digest.py", "cases.json"]
DEVELOPMENT = ["charged-twice", "stuck-tracking", "password-changed", "product-advice", "refund-missing",
               "charged-after-closing", "blank-message", "missing-body", "late-order"]
ENVIRONMENT = {key: value for key, value in os.environ.items()
               if not key.lower().endswith("_proxy") and key not in ("OLLAMA_HOST", "BENCH_API_KEY")}
if sys.flags.dev_mode:    # the scripts are then watched as the tests are
    ENVIRONMENT |= {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}
HANGUP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
PYTHON = [sys.executable, "-S"]    # the scripts need no site module, and starting it is a third of a short run

SYSTEMS = '''
"""Systems for the tests: each answers at once unless it says otherwise."""
import json, os, time
from pathlib import Path
import harness

class Quick:
    name, version, mode, model, tools = "quick", "1", "live", "none", []
    prompt, sampling = {"name": "none", "sha256": ""}, {"temperature": 1.0}
    def respond(self, case, trial):
        if "expected_error" in case:
            raise ValueError("blank")
        return harness.Answer(self.output(case, trial), {"seed": 1000 + trial})
    def output(self, case, trial):
        return case["expected"]

class Slow(Quick):
    def output(self, case, trial):
        time.sleep(float(os.environ.get("SLOW_S", "0.004")))
        return {"category": "billing", "needs_human": bool(hash((len(case["id"]), trial)) % 2)}

class Odd(Quick):
    """Returns the values in the file odd.py in turn, one a trial, for every case."""
    def output(self, case, trial):
        return eval(Path("odd.py").read_text(encoding="utf-8"))[trial]

class Scripted(Quick):
    """Does what the words in script.txt say, one a call: ok, away, busy, busy:SECONDS or an exception's name."""
    calls = 0
    def output(self, case, trial):
        words = Path("script.txt").read_text().split()
        word = words[min(self.calls, len(words) - 1)]
        self.calls += 1
        if word == "away":
            raise harness.Unavailable("the server is away")
        if word.startswith("busy"):
            raise harness.Busy("the server is busy", float(word[5:]) if word[5:] else None)
        if word != "ok":
            raise type(word, (Exception,), {})("as scripted")
        return case["expected"]
    def alive(self):
        return Path("alive.txt").exists()

quick, slow, odd, scripted = Quick(), Slow(), Odd(), Scripted()
other = Quick(); other.sampling = {"temperature": 0.5}
no_answer = Quick(); no_answer.output = None; no_answer.respond = lambda case, trial: {"category": "other"}
rude = Quick(); rude.check_model = lambda: 1 / 0
incomplete = object()

class Journal(Quick):
    """Writes down each call and each warm-up."""
    def __init__(self, model):
        self.name = model
    def note(self, *words):
        with open("journal.txt", "a") as file:
            print(self.name, *words, file=file)
    def output(self, case, trial):
        self.note(trial, case["id"])
        return {"category": ["billing", "delivery"][(len(self.name) + len(case["id"]) + trial) % 2], "needs_human": True}
    def warm_up(self):
        self.note("warm")

journal = Journal
def factory(model, temperature=1.0):
    made = Quick(); made.name, made.sampling = f"made-{model}", {"temperature": temperature}
    return made
'''


class BenchTest(unittest.TestCase):
    """A test with a folder of its own, in which the real scripts are started.

    Where INSIDE is true they run by their own main in this process: for tests whose subject is what they write.
    """
    INSIDE = False

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(os.path.realpath(folder.name))
        (self.folder / "systems.py").write_text(SYSTEMS)
        self.log = self.folder / "log.jsonl"

    def start(self, script, *args, env=None, **kwargs):
        return subprocess.Popen([*PYTHON, str(HERE / script) if not os.path.isabs(script) else script,
                                 *map(str, args)], cwd=self.folder, env=ENVIRONMENT | (env or {}),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", **kwargs)

    def run_script(self, script, *args, status=0, env=None, **kwargs):
        """Run a script to its end; return (stdout, stderr). Its exit status must be `status`."""
        if self.INSIDE and not (env or kwargs or os.path.isabs(script)):
            return self.inside(sys.modules[script.removesuffix(".py")], *args, status=status)
        process = self.start(script, *args, env=env, **kwargs)
        out, err = process.communicate(timeout=60)
        self.assertNotIn("Traceback", err)
        self.assertEqual(process.returncode, status, out + err)
        return out, err

    def bench(self, *args, system="systems:quick", **kwargs):
        return self.run_script("bench.py", "--system", system, "--log", self.log, *args, **kwargs)

    def inside(self, module, *args, status=0):
        """As `run_script`, by the script's own main in this process: for long tables of input."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        signals = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, *HANGUP)]
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                returned = harness.run_command(lambda: module.main([str(arg) for arg in args]))
        except SystemExit as exit:    # argparse
            returned = exit.code
        finally:
            os.chdir(before)
            for number, handler in signals:
                signal.signal(number, handler)
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                    del sys.modules[name]    # the next test has its own
            for stream in (out, err):
                stream.flush()
        out, err = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
        self.assertEqual(returned, status, out + err)
        return out, err

    def refused_inside(self, module, *args):
        """As `refused`, in this process."""
        out, err = self.inside(module, *args, status=1)
        self.assertRegex(err, r"\Aerror: [^\n]+\n\Z")
        return err

    def refused(self, script, *args, status=1, **kwargs):
        """Run a script that must fail with one line `error: ...`; return that line."""
        out, err = self.run_script(script, *args, status=status, **kwargs)
        self.assertRegex(err, r"\Aerror: [^\n]+\n\Z")
        return err

    def report(self, *args, **kwargs):
        """Run report.py's main in this process; return (report.json's value, stdout)."""
        out, _ = self.inside(report, *(args or [self.log]), "--out", self.folder / "report.json", **kwargs)
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8")), out

    def rows(self):
        """The log's trials, by the plainest reader there is."""
        lines = self.log.read_bytes().split(b"\n")
        self.assertEqual(lines.pop(), b"")
        return [row for row in map(json.loads, lines[1:]) if "case_id" in row]

    def project(self):
        """Copy the project into the folder; return the folder."""
        for name in SCRIPTS:
            shutil.copy(HERE / name, self.folder)
        return self.folder

    def cases_file(self, *cases, name="cases.json"):
        path = self.folder / name
        path.write_text(json.dumps({"name": "few", "cases": list(cases)}))
        return path


def case(**changes):
    """A valid case, changed; a key with the value ... is left out."""
    whole = {"id": "one", "class": "billing", "split": "development", "input": "Hello",
             "expected": {"category": "other", "needs_human": False}} | changes
    return {key: value for key, value in whole.items() if value is not ...}


class MainJob(BenchTest):
    """The main job, with nothing installed."""

    def test_main_job_runs_ninety_trials_and_reports(self):
        folder = self.project()
        out, err = self.run_script(str(folder / "bench.py"))
        self.assertEqual((out, err), ("embedded-triage: planned 90, already logged 0, ran 90, not run 0\n", ""))
        out, _ = self.run_script(str(folder / "report.py"))
        self.assertTrue((folder / "runs" / "embedded-triage.jsonl").exists())
        written = json.loads((folder / "runs" / "report.json").read_text())
        system, = written["systems"]
        self.assertEqual(sum(system["verdicts"].values()), 90)
        self.assertEqual(list(system["per_case"]), DEVELOPMENT)
        for case_id, counts in system["per_case"].items():
            self.assertRegex(out, rf"(?m)^  {case_id} +{counts['pass']}/10 +\d\.\d\d to \d\.\d\d +[+x!.]{{10}}$")
        self.assertRegex(out, r"flaky: \w")
        self.assertRegex(out, r"(?m)^  pass@k( +\d\.\d{4})+$")
        self.assertRegex(out, r"(?m)^  pass\^k( +\d\.\d{4})+$")

    def test_embedded_system_shows_passing_flaky_and_failing_cases(self):
        self.bench(system="model_triage:embedded")
        system = self.report()[0]["systems"][0]
        self.assertTrue(system["flaky_cases"])
        self.assertTrue(system["never_passed"])
        self.assertIn(10, [counts["pass"] for counts in system["per_case"].values()])

    def test_works_from_any_directory_and_defaults_lie_beside_the_scripts(self):
        folder = self.project()
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        done = subprocess.run([*PYTHON, str(folder / "bench.py"), "--trials", "1"], cwd=elsewhere, env=ENVIRONMENT,
                              capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(elsewhere.iterdir()), [])
        self.assertTrue((folder / "runs" / "embedded-triage.jsonl").exists())

    def test_what_the_main_job_writes_is_ignored_by_git(self):
        ignored = (HERE / ".gitignore").read_text().split()
        self.assertIn("/runs/*", ignored)
        self.assertIn("!/runs/recorded/", ignored)

    def test_embedded_draws_depend_on_seed_and_message_alone(self):
        cases = {case["id"]: case for case in json.loads((HERE / "cases.json").read_text())["cases"]}
        draws = [model_triage.embedded.respond(cases["late-order"], trial).output for trial in range(200)]
        self.assertEqual(draws, [model_triage.embedded.respond(cases["late-order"], trial).output for trial in range(200)])
        self.assertGreater(len({json.dumps(draw) for draw in draws}), 1)

    def test_system_name_makes_the_logs_name(self):
        self.assertEqual(Path(bench.default_log(type("S", (), {"name": "a b/c:d_E.1-x"}))).name, "a-b-c-d--.1-x.jsonl")

    def test_module_is_looked_for_in_the_current_directory_first(self):
        (self.folder / "model_triage.py").write_text(SYSTEMS + "\nembedded = quick\n")
        out, _ = self.bench("--trials", 1, system="model_triage:embedded")
        self.assertTrue(out.startswith("quick: planned 9"))

    def test_factory_gets_the_model_and_the_options(self):
        out, _ = self.bench("--trials", 1, "--temperature", "0.25", system="systems:factory=m:1")
        self.assertTrue(out.startswith("made-m:1: planned 9"))
        self.assertEqual(bench.TrialLog(self.log).header["system"]["sampling"], {"temperature": 0.25})


class StopAndResume(BenchTest):

    def test_budget_stops_between_trials_and_the_same_command_goes_on(self):
        out, _ = self.bench("--budget-s", "0.1", system="systems:slow", env={"SLOW_S": "0.02"})
        ran = int(re.fullmatch(r"quick: planned 90, already logged 0, ran (\d+), not run \d+ "
                               r"\(stopped by the time budget\)\n", out)[1])
        before = self.log.read_bytes()
        out, _ = self.bench(system="systems:slow", env={"SLOW_S": "0"})
        self.assertEqual(out, f"quick: planned 90, already logged {ran}, ran {90 - ran}, not run 0\n")
        self.assertTrue(self.log.read_bytes().startswith(before))
        self.assertEqual(len({(row["case_id"], row["trial"]) for row in self.rows()}), 90)

    def test_trials_run_in_trial_major_order(self):
        self.bench("--trials", 3)
        self.assertEqual([(row["trial"], row["case_id"]) for row in self.rows()],
                         [(trial, case_id) for trial in range(3) for case_id in DEVELOPMENT])

    def test_budget_of_zero_runs_nothing_and_exits_0(self):
        out, _ = self.bench("--budget-s", 0)
        self.assertEqual(out, "quick: planned 90, already logged 0, ran 0, not run 90 (stopped by the time budget)\n")

    def test_finished_log_resumed_does_nothing_and_says_so(self):
        self.bench("--trials", 1)
        before = self.log.read_bytes()
        out, err = self.bench("--trials", 1)
        self.assertEqual(out, "quick: planned 9, already logged 9, ran 0, not run 0\n")
        self.assertIn("nothing to run", err)
        self.assertEqual(self.log.read_bytes(), before)

    def test_resume_appends_one_line_that_describes_its_session(self):
        self.bench("--budget-s", 0)
        self.bench("--hardware", "a laptop", "--trials", 10)
        resumed = json.loads(self.log.read_text().splitlines()[1])
        self.assertEqual(list(resumed), ["resumed_at", *bench.DESCRIBING])
        self.assertEqual(resumed["environment"]["hardware"], "a laptop")

    def test_convert_fills_in_not_run_and_the_report_then_has_no_curve(self):
        self.bench("--budget-s", "0.1", system="systems:slow", env={"SLOW_S": "0.02"})
        recording, record = self.folder / "recording.json", self.folder / "record.json"
        out, _ = self.run_script("bench.py", "--log", self.log, "--convert", recording)
        missing = 90 - len(self.rows())
        self.assertEqual(out, f"{recording}: 90 trials, {missing} of them not run\n")
        results = json.loads(recording.read_text())["results"]
        self.assertEqual([(row["trial"], row["case_id"]) for row in results],
                         [(trial, case_id) for trial in range(10) for case_id in DEVELOPMENT])
        self.assertEqual(sum(row.get("error", {}).get("types") == ["NotRun"] for row in results), missing)
        self.run_script("harness.py", "run", "--recording", recording, "--out", record)
        for source in (record, self.log):
            with self.subTest(source.name):
                written, out = self.report(source)
                system, = written["systems"]
                self.assertIsNone(system["curve"])
                self.assertEqual(system["not_run"], missing)
                self.assertEqual(system["incomplete_by_error"], {"NotRun": missing})
                self.assertIn(f"no pass@k and no pass^k: {missing} planned trials were not run", out)

    def test_log_and_run_record_give_the_same_report(self):
        self.bench(system="model_triage:embedded")
        self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "recording.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "recording.json", "--out", self.folder / "r.json")
        from_log, from_record = self.report(self.log)[0], self.report(self.folder / "r.json")[0]
        for written in (from_log, from_record):
            del written["systems"][0]["source"], written["systems"][0]["wall_s"]    # a recording has no times of day
        self.assertEqual(from_log, from_record)

    def test_nothing_changes_when_trials_come_in_another_order(self):
        self.bench(system="model_triage:embedded")
        first = self.report()[0]
        del first["systems"][0]["wall_s"]
        header, *lines = self.log.read_bytes().splitlines(keepends=True)
        random.Random(7).shuffle(lines)
        self.log.write_bytes(header + b"".join(lines))
        again = self.report()[0]
        del again["systems"][0]["wall_s"]
        self.assertEqual(again, first)

    def test_resume_under_another_python_or_server_is_allowed_and_the_report_names_what_it_mixes(self):
        self.bench("--trials", 2, "--budget-s", "0.1", system="systems:slow", env={"SLOW_S": "0.06"})
        self.log.write_text(self.log.read_text().replace('"python":"', '"python":"older '))
        first = len(self.rows())
        self.bench("--trials", 2, "--workers", 2, "--hardware", "another", system="systems:slow", env={"SLOW_S": "0"})
        self.assertEqual([row["metadata"]["session"] for row in self.rows()], [0] * first + [1] * (18 - first))
        self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "r.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "r.json", "--out", self.folder / "o.json")
        for source in (self.log, self.folder / "o.json"):
            written, out = self.report(source)
            self.assertEqual(written["systems"][0]["mixed"]["workers"], ["1", "2"])
            self.assertIn("this log mixes python: ", out)
            self.assertIn("older ", out)

    def test_replies_that_name_different_models_are_visible(self):
        (self.folder / "mixed.py").write_text(SYSTEMS + """
quick.respond = lambda case, trial: harness.Answer({}, {"model": f"m{trial}", "server": "s"})
""")
        self.bench("--trials", 2, system="mixed:quick")
        written, out = self.report()
        self.assertEqual(written["systems"][0]["mixed"], {"models in replies": ["m0", "m1"]})
        self.assertIn("replies name the model m0, m1, where none was asked for", out)

    def test_outputs_digest_is_free_of_times_and_order(self):
        self.bench(system="model_triage:embedded")
        first, _ = self.run_script("outputs_digest.py", self.log)
        self.log.unlink()
        self.bench("--workers", 3, system="model_triage:embedded")
        second, _ = self.run_script("outputs_digest.py", self.log)
        self.assertEqual(first, second)
        self.assertRegex(first, rf"\A[0-9a-f]{{64}} 90 {re.escape(str(self.log))}\n\Z")


class Refusals(BenchTest):
    """Bad input gets one clear line, exit status 1, and nothing is touched."""
    INSIDE = True

    def refused_log(self, *args, system="systems:quick", **kwargs):
        before = self.log.read_bytes()
        error = self.refused("bench.py", "--system", system, "--log", self.log, *args, **kwargs)
        self.assertEqual(self.log.read_bytes(), before)
        return error

    def test_log_of_another_trial_count_names_both(self):
        self.bench("--trials", 2)
        self.assertIn("trials (2 there, 3 here)", self.refused_log("--trials", 3))

    def test_log_of_another_sampling_names_both(self):
        self.bench("--trials", 2)
        self.assertIn("system.sampling.temperature (1.0 there, 0.5 here)",
                      self.refused_log("--trials", 2, system="systems:other"))

    def test_log_of_another_case_set_names_it(self):
        self.bench("--trials", 2)
        one = self.cases_file(case())
        error = self.refused_log("--trials", 2, "--cases", one)
        self.assertIn("inputs_sha256", error)
        self.assertIn("case_set_sha256", error)

    def test_log_of_other_splits_names_both(self):
        self.bench("--trials", 2)
        self.log.write_text(self.log.read_text().replace('"splits":["development"]', '"splits":["held-out"]'))
        self.assertIn('splits (["held-out"] there, ["development"] here)', self.refused_log("--trials", 2))

    def test_changed_answer_changes_the_case_set_and_changed_layout_does_not(self):
        self.bench("--trials", 1)
        cases = self.folder / "cases.json"
        data = json.loads((HERE / "cases.json").read_text())
        cases.write_text(json.dumps(data, indent=7))
        self.bench("--trials", 1, "--cases", cases)
        data["cases"][0]["expected"]["category"] = "other"
        cases.write_text(json.dumps(data))
        error = self.refused_log("--trials", 1, "--cases", cases)
        self.assertIn("case_set_sha256", error)
        self.assertNotIn("inputs_sha256", error)

    def test_system_that_cannot_be_named(self):
        for spec, said in (("nope", "module:attribute"), ("nope:x", "no module nope"), ("systems:nope", "has no nope"),
                           ("systems:quick=", "module:attribute=MODEL"), ("systems:incomplete", "respond"),
                           ("systems:factory", "systems:factory=MODEL"), ("systems:quick=m", "options"),
                           ("model_triage:openai=m", "--endpoint URL")):
            with self.subTest(spec):
                self.assertIn(said, self.refused_inside(bench, "--system", spec, "--log", self.log))
                self.assertFalse(self.log.exists())

    def test_module_that_does_not_import(self):
        (self.folder / "broken.py").write_text("import nothing_of_this_name")
        (self.folder / "wrong.py").write_text("x = = 1")
        self.assertIn("nothing_of_this_name", self.refused("bench.py", "--system", "broken:x"))
        self.assertIn("SyntaxError", self.refused("bench.py", "--system", "wrong:x"))
        self.assertIn("CHECKS", self.refused("bench.py", "--task", "systems"))

    def test_absent_option_is_not_a_null_one(self):
        (self.folder / "nulls.py").write_text(SYSTEMS + """
a, b = Quick(), Quick()
a.sampling, b.sampling = {"stop": None}, {}
""")
        self.bench("--trials", 1, system="nulls:a")
        self.assertIn("system.sampling.stop (only there)", self.refused_log("--trials", 1, system="nulls:b"))

    def test_factory_that_fails_is_one_line(self):
        (self.folder / "failing.py").write_text("def make(model): raise ValueError('no ' + model)\n")
        self.assertIn("ValueError: no x", self.refused("bench.py", "--system", "failing:make=x"))

    def test_system_whose_every_trial_fails_is_pointed_out(self):
        (self.folder / "failing.py").write_text(SYSTEMS + "\nquick.respond = lambda case, trial: 1 / 0\n")
        _, err = self.bench("--trials", 1, system="failing:quick")
        self.assertIn("note: every trial of this run is incomplete", err)

    def test_options_that_do_not_fit(self):
        for args, said in ((["--system", "model_triage:openai=m", "--endpoint", "http://h", "--think", "on"], "for Ollama"),
                           (["--system", "model_triage:openai=m", "--endpoint", "http://h/v1/chat/completions"], "base")):
            self.assertIn(said, self.refused("bench.py", "--log", self.log, *args))
        for args in (["--regrade"], ["--trial", "3"], ["--log", "folder/"]):
            self.inside(bench, *args, status=2)
        self.inside(report, self.log, "--price-in", "1", status=2)

    def test_options_that_a_fixed_system_does_not_take(self):
        self.assertIn("takes no --temperature",
                      self.refused("bench.py", "--system", "model_triage:gemma", "--temperature", "0"))

    def test_system_that_changes_the_case_changes_no_other_trial(self):
        (self.folder / "changing.py").write_text(SYSTEMS + """
def respond(case, trial):
    answer = harness.Answer(case.get("expected"), {"input": case["input"]})
    case.clear()
    return answer
quick.respond = respond
""")
        self.bench("--trials", 2, "--cases", self.cases_file(case()), system="changing:quick")
        self.assertEqual([row["metadata"]["input"] for row in self.rows()], ["Hello", "Hello"])

    def test_systems_that_do_not_keep_the_protocol_get_one_line(self):
        for change, said in (("quick.seed_for = lambda trial: {1}\nquick.respond = None", "seed_for of system quick returned set"),
                             ("quick.endpoint = 8080", "`endpoint` is int"), ("quick.server = object()", "`server` is object"),
                             ("Quick.name = 5", "`name`"), ("Quick.sampling = {1, 2}", "`sampling`"),
                             ("Quick.sampling = {'a': float('nan')}", "is not JSON"),
                             ("quick.check_model = lambda: exit(0) if 0 else __import__('sys').exit(0)", "raised SystemExit")):
            with self.subTest(change):
                (self.folder / "odd_system.py").write_text(SYSTEMS + "\n" + change + "\n")
                _, err = self.inside(bench, "--system", "odd_system:quick", "--log", self.log, "--trials", 1, status=1)
                self.assertRegex(err, r"\Aerror: [^\n]+\n\Z")
                self.assertIn(said, err)

    def test_system_that_returns_no_answer_or_fails_its_own_check(self):
        self.assertIn("not an Answer", self.bench_error("systems:no_answer"))
        self.assertIn("check_model of system quick raised ZeroDivisionError", self.bench_error("systems:rude"))

    def bench_error(self, system):
        out, err = self.run_script("bench.py", "--system", system, "--log", self.log, status=1)
        return err

    def test_files_that_are_not_there(self):
        self.assertIn("nope.json: No such file", self.refused("bench.py", "--cases", "nope.json"))
        self.assertIn("nope.jsonl", self.refused("report.py", "nope.jsonl"))
        self.assertIn("nope.jsonl", self.refused("outputs_digest.py", "nope.jsonl"))
        self.assertIn("nope.jsonl", self.refused("bench.py", "--log", "nope.jsonl", "--convert", "r.json"))
        self.assertIn("nope.json", self.refused("harness.py", "run", "--recording", "nope.json", "--out", "r.json"))

    def test_bad_usage_is_argparses_exit_2(self):
        for args in (["--trials", "0"], ["--trials", "x"], ["--budget-s", "-1"], ["--budget-s", "nan"],
                     ["--patience-s", "-1"], ["--workers", "0"], ["--max-tokens", "0"], ["--temperature", "-1"],
                     ["--extra-body", "[]"], ["--extra-body", "{"], ["--format", "xml"], ["--convert", "x.jsonl"], ["--log", ""], ["--request-delay-s", "1e10"],
                     ["--trials", "9" * 400], ["--budget-s", "inf"]):
            with self.subTest(args):
                _, err = self.inside(bench, *args, status=2)
                self.assertIn("usage:", err)

    def test_output_keeps_the_mode_of_the_file_that_it_replaces(self):
        self.bench("--trials", 1)
        out = self.folder / "r.json"
        self.run_script("bench.py", "--log", self.log, "--convert", out)
        os.chmod(out, 0o600)
        self.run_script("bench.py", "--log", self.log, "--convert", out)
        self.assertEqual(out.stat().st_mode & 0o777, 0o600 if os.name == "posix" else out.stat().st_mode & 0o777)

    def test_log_of_any_name_is_read_and_never_written_over(self):
        self.bench("--trials", 1)
        named = self.folder / "run.log"
        self.log.rename(named)
        self.report(named)
        self.assertIn("is a trial log", self.refused("harness.py", "record", "--out", named))

    def test_output_never_goes_over_a_trial_log_or_an_input(self):
        self.bench("--trials", 1)
        self.run_script("report.py", self.log, "--out", self.log, status=2)
        self.run_script("bench.py", "--log", self.log, "--convert", self.log, status=2)
        renamed = self.folder / "log.json"
        self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "recording.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "recording.json", "--out", renamed)
        self.assertIn("is an input", self.refused("report.py", renamed, "--out", renamed))
        plain, link = self.folder / "plain.log", self.folder / "link.json"
        shutil.copy(self.log, plain)
        link.symlink_to(self.log)
        before = self.log.read_bytes(), renamed.read_bytes()
        self.assertIn("is an input", self.refused("bench.py", "--log", plain, "--convert", plain))
        self.run_script("bench.py", "--log", plain, "--convert", link, status=2)
        cases = self.cases_file(case())
        for script, args in (("report.py", [self.log, "--out", cases]), ("bench.py", ["--log", self.log, "--convert", cases])):
            self.assertIn("is an input", self.refused(script, *args, "--cases", cases))
        recording = self.folder / "recording.json"
        self.assertIn("is an input", self.refused("harness.py", "run", "--recording", recording, "--out", recording))
        self.assertEqual((self.log.read_bytes(), renamed.read_bytes()), before)

    def test_report_leaves_out_logs_of_another_case_set_and_says_which(self):
        folder = self.project()
        self.run_script(str(folder / "bench.py"), "--trials", 1)
        shutil.copy(folder / "cases.json", folder / "old.json")
        (folder / "old.json").write_text((folder / "cases.json").read_text().replace("lamp", "clock"))
        self.run_script(str(folder / "bench.py"), "--trials", 1, "--cases", "old.json", "--log", "runs/old.jsonl")
        out, _ = self.run_script(str(folder / "report.py"))
        self.assertIn("left out: old.jsonl", out)
        self.assertEqual(len(json.loads((folder / "runs" / "report.json").read_text())["systems"]), 1)
        error = self.refused(str(folder / "report.py"), "runs/old.jsonl")
        self.assertIn("old.json", error)

    def test_report_without_any_log_says_what_to_do(self):
        folder = self.project()
        self.assertIn("bench.py", self.refused(str(folder / "report.py")))


class CaseSets(BenchTest):
    INSIDE = True

    def test_case_set_of_this_project_is_as_described(self):
        case_set = harness.load_cases(HERE / "cases.json", harness.load_task("triage_task"))
        self.assertEqual([one["id"] for one in case_set["cases"] if one["split"] == "development"], DEVELOPMENT)
        held_out = [one for one in case_set["cases"] if one["split"] == "held-out"]
        self.assertEqual(len(held_out), 7)
        self.assertEqual({one["class"] for one in case_set["cases"]}, {one["class"] for one in held_out})
        by_id = {one["id"]: one for one in case_set["cases"]}
        self.assertTrue(by_id["password-changed"]["critical"])
        self.assertEqual(by_id["charged-after-closing"]["class"], "billing, ambiguous wording")

    def test_faults_are_named_with_file_and_case(self):
        faults = {
            "earlier case has the same id": [case(), case()],
            "unknown split 'test'": [case(split="test")],
            "unknown key 'expcted'": [case(expcted=1)],
            "exactly one of": [case(expected=...)],
            "exactly one of ": [case(expected_error="ValueError")],
            "its own expected answer fails the check output-fields": [case(expected={"category": "spam"})],
            "its own expected answer fails the check failure-criteria":
                [case(failure_criteria=[{"field": "needs_human", "equals": False, "why": "it matters"}])],
            "an id is": [case(id="One")],
            "an id is ": [case(id="a--b")],
            "'input' is missing": [case(input=...)],
            "`class`": [case(**{"class": " "})],
            "`critical`": [case(critical="yes")],
            "`failure_criteria`": [case(failure_criteria={"field": 1})],
            "a class name": [case(expected=..., expected_error="not a name")],
            "`expected` must be an object": [case(expected="billing")],
            "a case is an object": ["case"],
            "a case set is": [],
        }
        for said, cases in faults.items():
            with self.subTest(said):
                path = self.cases_file(*cases)
                error = self.refused_inside(harness, "check", "--cases", path)
                self.assertIn(str(path), error)
                self.assertIn(said.strip(), error)
                if cases and isinstance(cases[-1], dict) and said != "an id is":
                    self.assertIn(repr(cases[-1]["id"]), error)

    def test_case_set_that_is_not_json_or_not_utf8(self):
        path = self.folder / "cases.json"
        for content in (b"{", b"\xff\xfe", b'{"name": NaN}', b"[" * 100000):
            path.write_bytes(content)
            self.assertIn("is not JSON", self.refused("harness.py", "check", "--cases", path))

    def test_held_out_split_is_refused_unless_asked_for(self):
        case_set = harness.load_cases(HERE / "cases.json", harness.load_task("triage_task"))
        with self.assertRaisesRegex(harness.RunError, "held-out"):
            harness.plan(case_set, ["held-out"], 1)
        self.assertEqual(len(list(harness.plan(case_set, ["held-out"], 2, include_held_out=True))), 14)

    def test_held_out_cases_are_in_no_log_and_no_report(self):
        self.bench("--trials", 1)
        self.assertEqual({row["case_id"] for row in self.rows()}, set(DEVELOPMENT))
        self.assertEqual(list(self.report()[0]["systems"][0]["per_case"]), DEVELOPMENT)

    def test_inputs_digest_is_over_what_a_model_sees(self):
        task = harness.load_task("triage_task")
        first = harness.load_cases(self.cases_file(case(), case(id="two")), task)
        answered = harness.load_cases(self.cases_file(case(expected={"category": "billing", "needs_human": False}),
                                                      case(id="two")), task)
        asked = harness.load_cases(self.cases_file(case(input="Hello!"), case(id="two")), task)
        moved = harness.load_cases(self.cases_file(case(id="two"), case()), task)
        self.assertEqual(first["inputs_sha256"], answered["inputs_sha256"])
        self.assertNotEqual(first["sha256"], answered["sha256"])
        self.assertEqual(len({one["inputs_sha256"] for one in (first, asked, moved)}), 3)


class Grading(BenchTest):
    INSIDE = True

    CHECKS = triage_task.CHECKS

    def grade(self, case, **result):
        if "types" in result:
            result = {"error": {"types": result["types"], "message": "m"}}
        return harness.grade(case, 0, result, self.CHECKS)

    def test_every_row_of_the_table(self):
        answer, error = case(), case(expected=..., expected_error="ValueError")
        right = answer["expected"]
        for given, wanted in (
                ((error, dict(types=["ValueError"])), ("pass", None)),
                ((error, dict(output=right)), ("fail", "rejection")),
                ((error, dict(output=None)), ("fail", "rejection")),
                ((answer, dict(output=right)), ("pass", None)),
                ((answer, dict(output=None)), ("fail", "output-fields")),
                ((answer, dict(output=right | {"category": "billing"})), ("fail", "triage-outcome")),
                ((answer, dict(types=["TimeoutError"])), ("incomplete", None)),
                ((error, dict(types=["TimeoutError"])), ("incomplete", None)),
                ((answer, dict(types=["ValueError"])), ("incomplete", None))):
            with self.subTest(given):
                self.assertEqual(self.grade(given[0], **given[1])[:2], wanted)

    def test_reply_that_is_not_json_is_not_the_rejection_of_an_input(self):
        try:
            harness.parse_json("no")
        except ValueError as error:
            types = harness.error_types(error)
        self.assertEqual(types, ["JSONDecodeError", "ValueError", "Exception"])
        verdict, _, reason = self.grade(case(expected=..., expected_error="ValueError"), types=types)
        self.assertEqual((verdict, reason), ("incomplete", "JSONDecodeError: m"))

    def test_integer_of_too_many_digits_is_not_a_rejection_either(self):
        with self.assertRaises(json.JSONDecodeError):
            harness.parse_json("1" * 5000)

    def test_failure_criterion_fails_whatever_else_the_output_says(self):
        critical = case(expected={"category": "account", "needs_human": True}, failure_criteria=[
            {"field": "needs_human", "equals": False, "why": "a person must look"}])
        verdict, check, reason = self.grade(critical, output={"category": "billing", "needs_human": False})
        self.assertEqual((verdict, check), ("fail", "failure-criteria"))
        self.assertIn("a person must look", reason)

    def test_check_that_raises_stops_the_harness_with_its_name(self):
        (self.folder / "bad_task.py").write_text(
            "def boom(case, output):\n    if output['category'] != 'other': raise KeyError('x')\n"
            "CHECKS = (('exploding', boom),)\n")
        cases = self.cases_file(case())
        self.bench("--trials", 1, "--cases", cases, system="model_triage:embedded")
        header, row = self.log.read_text().splitlines()
        row = json.loads(row) | {"output": {"category": "billing", "needs_human": False}}
        self.log.write_text(header + "\n" + json.dumps(row) + "\n")
        self.run_script("bench.py", "--log", self.log, "--cases", cases, "--convert", self.folder / "r.json")
        for script, args in (("report.py", [self.log]),
                             ("harness.py", ["run", "--recording", self.folder / "r.json", "--out", self.folder / "o.json"])):
            regrade = ["--regrade"] if script == "report.py" else []
            error = self.refused(script, *args, "--task", "bad_task", "--cases", cases, *regrade)
            self.assertIn("check exploding, case one, trial 0", error)

    def test_check_proves_that_junk_never_passes(self):
        out, _ = self.run_script("harness.py", "check")
        self.assertRegex(out, r"\Acases.json: 16 cases \(9 development, 7 held-out\); every expected answer passes, "
                              r"and each of \d+ junk outputs is refused\n\Z")

    def test_task_of_another_name_is_refused_and_named_unless_regraded(self):
        (self.folder / "mine.py").write_text((HERE / "triage_task.py").read_text())
        self.bench("--trials", 1, "--task", "mine")
        self.assertIn("name it with --task mine", self.refused("report.py", self.log, "--out", "r.json"))
        self.report(self.log, "--task", "mine")
        self.report(self.log, "--regrade")

    def test_check_finds_a_task_that_lets_junk_pass(self):
        (self.folder / "lax_task.py").write_text("CHECKS = (('any', lambda case, output: None),)\n")
        self.assertIn("let junk pass", self.refused("harness.py", "check", "--task", "lax_task"))

    def test_run_record_walks_back_to_the_trial(self):
        self.bench("--trials", 2, system="model_triage:embedded")
        self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "r.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "r.json", "--out", self.folder / "o.json")
        record = json.loads((self.folder / "o.json").read_text())
        self.assertEqual(record["manifest"]["system"]["mode"], "replay")
        logged = {(row["case_id"], row["trial"]): row for row in self.rows()}
        run_id = bench.TrialLog(self.log).header["run_id"]
        for result in record["results"]:
            row = logged[result["case_id"], result["trial"]]
            self.assertEqual(result["trial_id"], f"{run_id}/{row['case_id']}/{row['trial']}")
            self.assertEqual(result["metadata"], row["metadata"] | {"recorded_latency_s": row["latency_s"]})
            self.assertEqual(result["output"], row.get("output"))

    def test_record_keeps_a_quick_system_whole(self):
        self.run_script("harness.py", "record", "--trials", 2, "--out", self.folder / "r.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "r.json", "--out", self.folder / "o.json")
        self.assertEqual(len(json.loads((self.folder / "o.json").read_text())["results"]), 18)

    def test_recording_that_is_not_whole_is_refused(self):
        self.run_script("harness.py", "record", "--trials", 1, "--out", self.folder / "r.json")
        whole = json.loads((self.folder / "r.json").read_text())
        for change, said in ((lambda r: r["results"].pop(), "holds 8 of 9"),
                             (lambda r: r["results"].append(r["results"][0]), "result 10: an earlier result"),
                             (lambda r: r["results"][0].pop("output"), "result 1: a trial has exactly one"),
                             (lambda r: r.pop("run_id"), "is not a recording"), (lambda r: r.update(trials=10 ** 30), "`trials`"),
                             (lambda r: r.update(trials=0, results=[]), "`trials`"), (lambda r: r.update(system={}), "`system`"),
                             (lambda r: r.update(case_set_sha256="0" * 64), "--cases")):
            with self.subTest(said):
                changed = json.loads(json.dumps(whole))
                change(changed)
                (self.folder / "r.json").write_text(json.dumps(changed))
                self.assertIn(said, self.refused_inside(harness, "run", "--recording", "r.json", "--out", "o.json"))

    def test_run_record_that_was_tampered_with_is_refused(self):
        self.run_script("harness.py", "record", "--trials", 1, "--out", self.folder / "r.json")
        self.run_script("harness.py", "run", "--recording", self.folder / "r.json", "--out", self.folder / "o.json")
        whole = json.loads((self.folder / "o.json").read_text())
        for change, said in ((lambda r: r["results"].pop(), "each planned trial"),
                             (lambda r: r["results"][3].pop("verdict"), "result 4: it has no verdict"),
                             (lambda r: r["results"][3].update(metadata=[]), "result 4: `metadata`"),
                             (lambda r: r["results"][3].update(trial=7), "result 4: trial 7"),
                             (lambda r: r["manifest"].pop("run_id"), "is not a run record"),
                             (lambda r: r["manifest"].update(trials=1.0), "`trials` is 1.0"),
                             (lambda r: r["manifest"].update(system={}), "`system`: `name`"),
                             (lambda r: r["results"][3].update(verdict="incomplete", reason="E: m"), "has an `error`"),
                             (lambda r: r["results"][3]["metadata"].update(recorded_latency_s=10 ** 400), "`latency_s`"),
                             (lambda r: r.clear(), "is not a run record")):
            with self.subTest(said):
                changed = json.loads(json.dumps(whole))
                change(changed)
                (self.folder / "bad.json").write_text(json.dumps(changed))
                self.assertIn(said, self.refused_inside(report, "bad.json"))


class Numbers(BenchTest):
    INSIDE = True

    def test_ten_trials_with_seven_passes(self):
        curve = report.rounded_curve(report.curve(10, [7])[0])
        self.assertEqual(curve["1"], {"pass_at_k": 0.7, "pass_power_k": 0.7})
        self.assertEqual(curve["3"], {"pass_at_k": 0.9917, "pass_power_k": 0.2917})

    def test_nine_cases(self):
        curve, _ = map(report.rounded_curve, report.curve(10, [10, 10, 7, 2, 10, 10, 10, 10, 8]))
        ks = ("1", "2", "3", "5", "9", "10")
        self.assertEqual([curve[k]["pass_at_k"] for k in ks], [0.8556, 0.921, 0.9472, 0.9753, 1.0, 1.0])
        self.assertEqual([curve[k]["pass_power_k"] for k in ks], [0.8556, 0.7901, 0.7509, 0.7006, 0.6667, 0.6667])

    def test_both_metrics_equal_a_count_over_every_subset(self):
        for n in range(1, 9):
            for c in range(n + 1):
                trials = [True] * c + [False] * (n - c)
                for k in range(1, n + 1):
                    subsets = list(itertools.combinations(trials, k))
                    self.assertAlmostEqual(report.pass_at_k(n, c)[k - 1], sum(map(any, subsets)) / len(subsets), 12)
                    self.assertAlmostEqual(report.pass_power_k(n, c)[k - 1], sum(map(all, subsets)) / len(subsets), 12)

    def test_both_metrics_are_exact_at_a_thousand_trials(self):
        for c in (0, 1, 3, 500, 997, 1000):
            at, power = report.pass_at_k(1000, c), report.pass_power_k(1000, c)
            for k in (1, 2, 10, 333, 500, 999, 1000):
                whole = math.comb(1000, k)
                self.assertLess(abs(at[k - 1] - float(1 - Fraction(math.comb(1000 - c, k), whole))), 1e-12)
                self.assertLess(abs(power[k - 1] - float(Fraction(math.comb(c, k), whole))), 1e-12)

    def test_metrics_are_not_the_biased_ones(self):
        self.assertNotAlmostEqual(report.pass_at_k(10, 7)[2], 1 - 0.3 ** 3, 3)

    def test_percentiles_by_nearest_rank(self):
        self.assertEqual([report.nearest_rank([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], p) for p in (50, 90, 95, 100)], [5, 9, 10, 10])
        self.assertEqual(report.nearest_rank([1, 2, 3], 50), 2)
        self.assertIsNone(report.nearest_rank([], 50))

    def test_incomplete_trial_that_ran_counts_and_does_not_pass(self):
        (self.folder / "script.txt").write_text("ok ok ok Strange ok")
        self.bench("--trials", 5, "--cases", self.cases_file(case()), system="systems:scripted")
        system = self.report(self.log, "--cases", self.folder / "cases.json")[0]["systems"][0]
        counts = system["per_case"]["one"]
        self.assertEqual([counts[key] for key in ("class", "pass", "fail", "incomplete", "not_run", "marks", "pass_rate")],
                         ["billing", 4, 0, 1, 0, "+++!+", 0.8])
        self.assertEqual(system["curve"]["1"]["pass_at_k"], 0.8)
        self.assertEqual(system["incomplete_by_error"], {"Strange": 1})
        self.assertEqual(system["flaky_cases"], ["one"])
        self.assertEqual(system["latency_s"]["trials"], 4)

    def test_flaky_and_never_passed_look_at_the_trials_that_ran(self):
        for marks, flaky, never in (("++..", False, False), ("+x..", True, False), ("xx..", False, True), ("....", False, False),
                                    ("!...", False, True), ("+!..", True, False)):
            counts = report.counts_of(marks)
            self.assertEqual((report.is_flaky(counts), report.never_passed(counts)), (flaky, never), marks)

    def test_seed_of_the_system_is_logged_with_an_error(self):
        (self.folder / "seeded.py").write_text(SYSTEMS + "\nquick.seed_for = lambda trial: 7 * trial\nquick.respond = lambda c, t: 1 / 0\n")
        self.bench("--trials", 3, "--cases", self.cases_file(case()), system="seeded:quick")
        self.assertEqual([row["metadata"]["seed"] for row in self.rows()], [0, 7, 14])

    def test_worked_example_of_both_digests(self):
        rows = [{"case_id": "b", "trial": 0, "output": {"x": "é"}, "metadata": {"seed": 1000}, "latency_s": 0.5},
                {"case_id": "a", "trial": 1, "error": {"types": ["E"], "message": "m"}, "metadata": {}, "latency_s": None},
                {"case_id": "a", "trial": 0, "output": None, "metadata": {}, "latency_s": 1}]
        whole = ['{"case_id":"a","latency_s":1,"metadata":{},"output":null,"trial":0}',
                 '{"case_id":"b","latency_s":0.5,"metadata":{"seed":1000},"output":{"x":"é"},"trial":0}',
                 '{"case_id":"a","error":{"message":"m","types":["E"]},"latency_s":null,"metadata":{},"trial":1}']
        short = ['{"case_id":"a","output":null,"trial":0}', '{"case_id":"b","output":{"x":"é"},"trial":0}',
                 '{"case_id":"a","error":["E"],"trial":1}']
        for values, texts in ((map(harness.recorded, rows), whole), (map(outputs_digest.returned, rows), short)):
            digest = harness.TrialDigest(2)
            for value in values:
                digest.add(value)
            by_hand = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
            self.assertEqual(digest.hexdigest(), hashlib.sha256(by_hand).hexdigest())
        self.assertEqual(digest.hexdigest(), "922311bcf1b3df37d0ed74778e6d2156b84a704796311344c28b0df3f9a2961f")


# values that a model or a system may return: what goes into the log, and what is refused
ODD = r'''[
    "a\u2028b\u2029\u0085\x1c\x1d\x1e\x0b\x0c\r\n", "\ud800 alone \udfff", "\x00\x01\x7f", "\U0001f600 \u4e2d\u6587 \xe9",
    "x" * 3_000_000, -0.0, 1e308, 10 ** 4000, json.loads("[" * 500 + "]" * 500), {"": {"a": [None, True, 1.5]}}, None, "",
    float("nan"), float("inf"), {1, 2}, 10 ** 5000, "\ud83d\ude00"[:1] + "\ude00", (1, 2), {1: 2}, b"bytes", object(),
    (lambda f, n: f(f, n))(lambda f, n: [f(f, n - 1)] if n else [], 600), {"a": {"b": -float("inf")}}]'''
ODD_LOGGED = 12


class AnyBytes(BenchTest):
    """Whatever a model returns is logged as it is, or as an error that says why not, and read back."""
    INSIDE = True

    def test_outputs_are_logged_or_refused_and_read_back_resumed_converted_graded_and_reported(self):
        (self.folder / "odd.py").write_text(ODD)
        values = eval(ODD)
        cases = self.cases_file(case())
        args = ["--cases", cases, "--trials", len(values)]
        self.bench(*args, "--budget-s", "0", system="systems:odd")
        self.bench(*args, system="systems:odd")
        out, _ = self.bench(*args, system="systems:odd")
        self.assertEqual(out, f"quick: planned {len(values)}, already logged {len(values)}, ran 0, not run 0\n")
        rows = self.rows()
        self.assertEqual([row["output"] for row in rows[:ODD_LOGGED]], values[:ODD_LOGGED])
        self.assertEqual([row["error"]["types"][0] for row in rows[ODD_LOGGED:]],
                         ["UnloggableOutput"] * (len(values) - ODD_LOGGED))
        self.assertEqual([row["metadata"]["seed"] for row in rows], [1000 + trial for trial in range(len(values))])
        self.run_script("bench.py", "--log", self.log, "--cases", cases, "--convert", self.folder / "r.json")
        recorded = json.loads((self.folder / "r.json").read_text(encoding="utf-8"))["results"]
        self.assertEqual([row.get("output") for row in recorded], [row.get("output") for row in rows])
        self.run_script("harness.py", "run", "--cases", cases, "--recording", self.folder / "r.json",
                        "--out", self.folder / "o.json")
        system = self.report(self.folder / "o.json", "--cases", cases)[0]["systems"][0]
        self.assertEqual(system["incomplete_by_error"], {"UnloggableOutput": len(values) - ODD_LOGGED})
        self.assertEqual(system["recording_sha256"],
                         self.report(self.log, "--cases", cases)[0]["systems"][0]["recording_sha256"])

    def test_odd_exceptions_keep_their_own_name(self):
        (self.folder / "raising.py").write_text(SYSTEMS + r"""
class Mute(Exception):
    def __str__(self): raise RuntimeError
class Sealed(Exception):
    def __setattr__(self, name, value): raise AttributeError
def halves(): return ValueError("\ud83d" + "\ude00")
def with_metadata(metadata):
    error = KeyError("m"); error.metadata = metadata; return error
def make(trial):
    return [Mute(), Sealed("s"), halves(), with_metadata("x"), with_metadata({"a": {1}}), with_metadata({"a": 1})][trial]
def respond(case, trial): raise make(trial)
quick.respond = respond
""")
        self.bench("--trials", 6, "--cases", self.cases_file(case()), system="raising:quick")
        rows = self.rows()
        self.assertEqual([row["error"]["types"][0] for row in rows],
                         ["Mute", "Sealed", "ValueError", "KeyError", "KeyError", "KeyError"])
        self.assertEqual([row["error"]["message"] for row in rows[:3]],
                         ["(a message that cannot be shown)", "s", "\U0001f600"])
        self.assertEqual([row["metadata"].get("a") for row in rows], [None] * 5 + [1])
        self.assertEqual([row["metadata"]["seed"] for row in rows], list(range(1000, 1006)))

    def test_every_line_is_json_by_the_rfc_in_utf8(self):
        (self.folder / "odd.py").write_text(ODD)
        self.bench("--cases", self.cases_file(case()), "--trials", len(eval(ODD)), system="systems:odd")

        def not_json(word):
            self.fail(f"{word} is not in RFC 8259")
        for line in self.log.read_bytes().removesuffix(b"\n").split(b"\n"):
            self.assertIsInstance(json.loads(line.decode("utf-8"), parse_constant=not_json), dict)

    def test_text_of_a_model_counts_as_json_by_the_rfc_alone(self):
        for text in ("NaN", "[Infinity]", "-Infinity", "1e999", "1" * 5000, "[" * 100_000, "[" * 501 + "]" * 501, "", "{'a': 1}",
                     "\ufeff{}", "01", "{}x", '"\x01"', "{} {}"):
            with self.subTest(text[:20]), self.assertRaises(json.JSONDecodeError):
                harness.parse_json(text)
        for text in ("null", "  {}\r\n", '"\\ud800"', "[" * 500 + "]" * 500, "1e308", "-0"):
            harness.parse_json(text)


class AnyPointOfDeath(BenchTest):

    def test_log_cut_at_every_byte_resumes_and_loses_at_most_one_trial(self):
        cases = [case(id=f"c{number}", input="Pünktchen \u2028 中") for number in range(3)]
        path = self.cases_file(*cases)
        self.bench("--trials", 2, "--cases", path, system="model_triage:embedded")
        whole = self.log.read_bytes()
        ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
        ids = {one["id"] for one in cases}
        rows = self.rows()
        for cut in range(ends[0] - 1, len(whole)):
            self.log.write_bytes(whole[:cut])
            log = bench.TrialLog(self.log, writable=True)
            log.case_ids = ids
            kept = list(log.rows())
            self.assertEqual(kept, rows[:sum(cut >= end - 1 for end in ends[1:])])    # a whole last line needs no newline
            for row in rows[len(kept):]:
                log.append(row)
            log.close()
            self.assertEqual(self.log.read_bytes(), whole if len(kept) < len(rows) else whole[:cut])

    def test_cut_log_resumes_from_the_command_line(self):
        self.bench("--trials", 2, system="model_triage:embedded")
        whole = self.log.read_bytes()
        for tail, logged in ((b"", 18), (b'{"case_id":"cha', 18), (b"\0" * 300, 18), (b'{"case_id"\0\0\0', 18)):
            with self.subTest(tail):
                self.log.write_bytes(whole + tail)
                out, _ = self.bench("--trials", 2, system="model_triage:embedded")
                self.assertIn(f"already logged {logged}, ran 0", out)
                self.log.write_bytes(whole[:-40] + tail)
                out, _ = self.bench("--trials", 2, system="model_triage:embedded")
                self.assertIn("already logged 17, ran 1, not run 0", out)
                self.assertTrue(self.log.read_bytes().startswith(whole[:whole[:-1].rindex(b"\n") + 1]))
                self.assertEqual(len(self.rows()), 18)

    def test_header_without_its_newline_is_kept(self):
        self.bench("--trials", 1, "--budget-s", 0)
        self.log.write_bytes(self.log.read_bytes().removesuffix(b"\n"))
        self.bench("--trials", 1)
        self.assertEqual(len(self.rows()), 9)

    def test_header_is_written_whole_or_not_at_all(self):
        for name in ("write", "fsync", "link"):    # die at each step of making the log
            with self.subTest(name):
                code = f"import os, signal, bench, harness\n" \
                       f"real = os.{name}\n" if name != "write" else "import os, bench, harness\n"
                code += {"write": "encode = harness.encode\nharness.encode = lambda *a, **k: os._exit(9) "
                                  "if 'bench_version' in a[0] else encode(*a, **k)\n"}.get(
                    name, f"os.{name} = lambda *a: os._exit(9)\n")
                code += "bench.main(['--trials', '1', '--log', 'log.jsonl'])"
                done = subprocess.run([*PYTHON, "-c", code], cwd=self.folder,
                                      env=ENVIRONMENT | {"PYTHONPATH": str(HERE)})
                self.assertEqual(done.returncode, 9)
                self.assertFalse(self.log.exists())
        self.bench("--trials", 1)

    @unittest.skipUnless(hasattr(signal, "SIGKILL"), "needs SIGKILL")
    def test_killed_at_random_moments_and_resumed_ends_as_if_undisturbed(self):
        rng, kills = random.Random(20261130), 0
        env = {"PYTHONHASHSEED": "0", "SLOW_S": "0.008"}
        while True:
            before = self.log.stat().st_size if self.log.exists() else 0
            process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, "--trials", 12,
                                 "--workers", 1 + kills % 3, env=env)
            while process.poll() is None and not (self.log.exists() and self.log.stat().st_size > before):
                time.sleep(0.002)    # each run logs something before it is killed, however slow the machine
            try:
                process.wait(timeout=rng.uniform(0, 0.2))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            out, err = process.communicate()
            if process.returncode == 0:
                break
        self.assertGreater(kills, 1)
        disturbed = {(row["case_id"], row["trial"], json.dumps(row.get("output"))) for row in self.rows()}
        self.assertEqual(len(self.rows()), 108)
        self.log.unlink()
        self.bench("--trials", 12, system="systems:slow", env=env)
        self.assertEqual(disturbed, {(row["case_id"], row["trial"], json.dumps(row.get("output"))) for row in self.rows()})

    def test_every_trial_reaches_the_operating_system_at_once(self):
        process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, env={"SLOW_S": "0.05"})
        while not (self.log.exists() and self.log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.01)
        process.kill()
        process.communicate()
        self.assertGreaterEqual(self.log.read_bytes().count(b"\n"), 3)

    def test_synced_at_the_first_trial_a_second_after_the_last_sync_and_at_the_end(self):
        code = ("import os, sys, time, bench\nreal, clock, synced = os.fsync, [0.0], []\n"
                "os.fsync = lambda fd: (synced.append(clock[0]), real(fd))\n"
                "time.monotonic = lambda: clock[0]\n"
                "append = bench.TrialLog._write_at_end\n"
                "def write(self, line):\n    append(self, line)\n    clock[0] += 0.4\n"
                "bench.TrialLog._write_at_end = write\n"
                "bench.main(['--trials', '1', '--log', 'log.jsonl'])\nprint([round(t, 1) for t in synced])")
        done = subprocess.run([*PYTHON, "-c", code], cwd=self.folder, env=ENVIRONMENT | {"PYTHONPATH": str(HERE)},
                              capture_output=True, encoding="utf-8")
        # nine trials of 0.4 s: the header and its folder at 0; then at 1.2, 2.4 and 3.6 s; and the end
        self.assertEqual(done.stdout.splitlines()[-1], "[0.0, 0.0, 1.2, 2.4, 3.6, 3.6]", done.stderr)


class OneWriter(BenchTest):

    def test_second_writer_is_refused_while_readers_read_and_let_in_after_a_kill(self):
        first = self.start("bench.py", "--system", "systems:slow", "--log", self.log, env={"SLOW_S": "0.1"})
        try:
            while not (self.log.exists() and self.log.read_bytes().count(b"\n") >= 2):
                time.sleep(0.01)
            self.assertIn("is being written by another run",
                          self.refused("bench.py", "--system", "systems:slow", "--log", self.log))
            self.report()
            self.run_script("outputs_digest.py", self.log)
            self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "r.json")
            self.run_script("bench.py", "--system", "systems:slow", "--log", self.log, "--dry-run")
        finally:
            first.kill()
            first.communicate()
        out, _ = self.bench(system="systems:slow", env={"SLOW_S": "0"})
        self.assertIn("not run 0", out)

    def test_two_that_begin_a_log_at_once_leave_one_whole_log(self):
        started = [self.start("bench.py", "--system", "systems:slow", "--log", self.log, "--trials", 4) for _ in range(4)]
        statuses = []
        for process in started:
            process.communicate(timeout=60)
            statuses.append(process.returncode)
        self.assertIn(0, statuses)
        self.assertTrue(set(statuses) <= {0, 1})
        self.assertEqual(len(self.rows()), 36)
        self.assertEqual([path for path in os.listdir(self.folder) if path.endswith(".tmp")], [])


@unittest.skipUnless(os.name == "posix", "signals and limits as POSIX has them")
class Interrupts(BenchTest):

    def interrupted(self, number, *args, env=None, **kwargs):
        process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, *args,
                             env={"SLOW_S": "0.03"} | (env or {}), **kwargs)
        while not (self.log.exists() and self.log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        self.assertNotIn("Traceback", err)
        return process.returncode, out, err

    def test_each_signal_stops_at_once_with_counts_and_how_to_resume(self):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            for workers in (1, 3):
                with self.subTest(number=number, workers=workers):
                    self.log.unlink(missing_ok=True)
                    returned, out, err = self.interrupted(number, "--workers", workers)
                    self.assertEqual(returned, status)
                    ran = len(self.rows())
                    self.assertEqual(out, f"quick: planned 90, already logged 0, ran {ran}, not run {90 - ran}\n")
                    self.assertEqual(err, f"interrupted; the same command resumes {self.log}\n")

    def test_interrupt_does_not_wait_for_the_call_in_flight(self):
        process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, env={"SLOW_S": "30"})
        while not self.log.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual((process.returncode, out), (130, "quick: planned 90, already logged 0, ran 0, not run 90\n"))

    def test_interrupt_while_the_model_loads_prints_the_counts_too(self):
        (self.folder / "loading.py").write_text(SYSTEMS + "\nquick.warm_up = lambda: time.sleep(60)\n"
                                                "quick.check_model = lambda: print('ready', flush=True)\n")
        self.bench("--trials", 1, "--budget-s", "0.02", system="systems:slow", env={"SLOW_S": "0.05"})
        held = len(self.rows())
        for log, logged in ((self.log, held), (self.folder / "new.jsonl", 0)):
            process = self.start("bench.py", "--system", "loading:quick", "--log", log, "--trials", 1)
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
            self.assertEqual((process.returncode, out), (143, f"quick: planned 9, already logged {logged}, ran 0, "
                                                              f"not run {9 - logged}\n"))
            self.assertEqual(err, f"interrupted; the same command resumes {log}\n")

    def test_log_that_is_deleted_while_it_is_written_is_noticed(self):
        process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, env={"SLOW_S": "0.05"})
        while not (self.log.exists() and self.log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.01)
        self.log.unlink()
        _, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, err),
                         (1, f"error: {self.log} was deleted while the run wrote to it; its trials are lost\n"))

    def test_system_that_exits_has_not_answered(self):
        (self.folder / "exits.py").write_text(SYSTEMS + "\nimport sys\nQuick.output = lambda self, case, trial: sys.exit(0)\n")
        out, _ = self.bench("--trials", 1, "--cases", self.cases_file(case()), system="exits:quick")
        self.assertIn("ran 1, not run 0", out)
        self.assertEqual(self.rows()[0]["error"]["types"], ["SystemExit"])

    def test_log_that_is_changed_while_it_is_written_is_left_as_it_is(self):
        process = self.start("bench.py", "--system", "systems:slow", "--log", self.log, env={"SLOW_S": "0.05"})
        while not (self.log.exists() and self.log.read_bytes().count(b"\n") >= 3):
            time.sleep(0.01)
        with self.log.open("ab") as file:
            file.write(b"my note\n")
        _, err = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 1)
        self.assertIn("was changed by something else while the run wrote to it", err)
        self.assertIn(b"my note\n", self.log.read_bytes())

    def test_signal_while_the_system_closes_still_has_its_exit_status(self):
        (self.folder / "closing.py").write_text(SYSTEMS + "\nquick.close = lambda: print('closing', flush=True) or time.sleep(60)\n")
        process = self.start("bench.py", "--system", "closing:quick", "--log", self.log, "--trials", 1)
        self.assertIn("ran 9", process.stdout.readline())
        self.assertEqual(process.stdout.readline(), "closing\n")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        self.assertEqual((process.returncode, err), (143, ""))

    def test_lock_is_not_held_by_a_child_of_the_system(self):
        (self.folder / "forks.py").write_text(SYSTEMS + """
def respond(case, trial):
    if os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), 9)
quick.respond = respond
""")
        self.start("bench.py", "--system", "forks:quick", "--log", self.log, "--trials", 1).communicate(timeout=20)
        out, _ = self.bench("--trials", 1)
        self.assertIn("ran 9, not run 0", out)

    def test_log_that_is_no_regular_file_is_refused(self):
        os.mkfifo(self.folder / "pipe")
        self.assertIn("not a regular file", self.refused("bench.py", "--system", "systems:quick", "--log", self.folder / "pipe"))

    def test_closed_standard_output_does_no_harm(self):
        process = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *PYTHON, str(HERE / "bench.py"), "--log", str(self.log)],
                                 cwd=self.folder, env=ENVIRONMENT, stderr=subprocess.PIPE, encoding="utf-8")
        self.assertEqual((process.returncode, process.stderr, len(self.rows())), (0, "", 90))

    def test_signal_that_is_ignored_stays_ignored(self):
        returned, out, _ = self.interrupted(signal.SIGHUP, "--trials", 1, env={"SLOW_S": "0.02"},
                                            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.assertEqual((returned, out), (0, "quick: planned 9, already logged 0, ran 9, not run 0\n"))

    def test_full_disk_names_the_file_and_what_is_safe_and_resumes_after(self):
        self.bench("--budget-s", 0, "--cases", self.cases_file(case(), case(id="two")))
        room = self.log.stat().st_size + 1700

        def little_room():
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        out, err = self.bench("--cases", self.folder / "cases.json", status=1, preexec_fn=little_room)
        safe = len(self.rows())
        self.assertGreater(safe, 0)
        self.assertRegex(err, rf"\Aerror: {re.escape(str(self.log))} cannot be written: .*; {safe} trials are safe in it")
        self.assertEqual(out, f"quick: planned 20, already logged 0, ran {safe}, not run {20 - safe}\n")
        out, _ = self.bench("--cases", self.folder / "cases.json")
        self.assertEqual(out, f"quick: planned 20, already logged {safe}, ran {20 - safe}, not run 0\n")

    def test_output_that_cannot_be_written_is_named(self):
        self.bench("--trials", 1)
        self.assertEqual(self.refused("report.py", self.log, "--out", self.folder),
                         f"error: {self.folder} cannot be written: Is a directory\n")
        if os.path.exists("/dev/full"):
            self.assertIn("/dev/full cannot be written", self.refused("report.py", self.log, "--out", "/dev/full"))
            with open("/dev/full", "w") as full:
                process = subprocess.run([*PYTHON, str(HERE / "outputs_digest.py"), str(self.log)], stdout=full,
                                         stderr=subprocess.PIPE, env=ENVIRONMENT, encoding="utf-8")
            self.assertEqual((process.returncode, process.stderr), (1, "error: standard output: No space left on device\n"))

    def test_report_goes_to_a_pipe_when_told_to(self):
        self.bench("--trials", 1)
        out, _ = self.run_script("report.py", self.log, "--out", "/dev/stdout")
        self.assertIn('"report_version"', out)

    def test_reader_that_goes_away_gets_no_traceback(self):
        self.bench("--trials", 1)
        process = self.start("report.py", self.log, "--out", self.folder / "report.json")
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        self.assertEqual((process.wait(timeout=20), err), (1, ""))


class TamperedLogs(BenchTest):
    """A log that was tampered with, merged or half-edited is refused by line and reason, and left as it was."""
    INSIDE = True

    def setUp(self):
        super().setUp()
        self.bench("--trials", 2, "--budget-s", 0)
        self.bench("--trials", 2)
        self.lines = self.log.read_bytes().splitlines(keepends=True)

    def refused_as(self, content, said):
        """The log with this content must be refused on resume, on conversion and by the report."""
        self.log.write_bytes(content)
        error = self.refused_inside(bench, "--system", "systems:quick", "--trials", 2, "--log", self.log)
        self.assertIn(said, error)
        self.assertIn(str(self.log), error)
        case_set = harness.load_cases(HERE / "cases.json", harness.load_task("triage_task"))
        with self.assertRaisesRegex(harness.RunError, re.escape(said)):
            bench.to_recording(self.log, case_set)
        with self.assertRaisesRegex(harness.RunError, re.escape(said)):
            report.from_logs([self.log], report.parser().parse_args([str(self.log)]))
        self.assertEqual(self.log.read_bytes(), content)

    def test_refusal_reads_alike_from_every_script(self):
        content = b"".join(self.lines) + b"12\n"
        self.log.write_bytes(content)
        for script, args in (("bench.py", ["--system", "systems:quick", "--trials", 2, "--log", self.log]),
                             ("bench.py", ["--log", self.log, "--convert", self.folder / "r.json"]),
                             ("report.py", [self.log]), ("outputs_digest.py", [self.log])):
            self.assertIn(f"{self.log}: line {len(self.lines) + 1}: it is not a trial", self.refused(script, *args))
            self.assertEqual(self.log.read_bytes(), content)
        self.assertFalse((self.folder / "r.json").exists())

    def changed(self, line, **changes):
        row = json.loads(self.lines[line - 1]) | changes
        row = {key: value for key, value in row.items() if value is not ...}
        return b"".join([*self.lines[:line - 1], json.dumps(row).encode() + b"\n", *self.lines[line:]])

    def test_trial_twice(self):
        self.refused_as(b"".join(self.lines) + self.lines[2], "case charged-twice, trial 0 is in the log twice")

    def test_line_that_is_not_json_in_the_middle(self):
        self.refused_as(b"".join([*self.lines[:4], b"oops\n", *self.lines[4:]]), "line 5 is not JSON")

    def test_last_line_with_its_newline_is_not_forgiven(self):
        self.refused_as(b"".join(self.lines) + b'{"case_id":\n', f"line {len(self.lines) + 1} is not JSON")

    def test_blank_line_in_the_middle(self):
        self.refused_as(b"".join([*self.lines[:4], b"\n", *self.lines[4:]]), "line 5 is not JSON")

    def test_two_headers(self):
        self.refused_as(b"".join([*self.lines, self.lines[0]]), f"line {len(self.lines) + 1}: a second header")

    def test_rows_without_their_keys_or_of_the_wrong_types(self):
        for changes, said in (({"case_id": "nobody"}, "case 'nobody' is not in the plan"),
                              ({"case_id": "job-question"}, "case 'job-question' is not in the plan"), ({"case_id": 3}, "it is not a trial"),
                              ({"trial": 2}, "trial 2 is not in the plan of 2"), ({"trial": True}, "trial True"),
                              ({"trial": -1}, "trial -1"), ({"trial": ...}, "trial None"), ({"output": ...}, "a trial has exactly one of"),
                              ({"error": {"types": ["E"], "message": "m"}}, "a trial has exactly one of"),
                              ({"metadata": None}, "`metadata`"), ({"latency_s": "1"}, "`latency_s`"),
                              ({"latency_s": None}, "`latency_s`"), ({"latency_s": 10 ** 400}, "`latency_s`"),
                              ({"output": ..., "error": {"types": ["NotRun"], "message": "m"}}, "a log holds no trial"), ({"started_at": ...}, "`started_at`"),
                              ({"output": ..., "error": {"types": [], "message": "m"}}, "`error`"),
                              ({"output": ..., "error": "E"}, "`error`"), ({"case_id": ...}, "it is not a trial")):
            with self.subTest(changes):
                self.refused_as(self.changed(5, **changes), f"line 5: {said}")

    def test_headers_of_the_wrong_types(self):
        for changes in ({"workers": None}, {"environment": "x"}, {"trials": "2"}, {"trials": 0}, {"trials": 10 ** 12}, {"run_id": ...}, {"system": []}, {"splits": None},
                        {"shard": "x"}, {"system": {}}):
            with self.subTest(changes):
                self.refused_as(self.changed(1, **changes), "line 1: the header's")

    def test_files_that_are_no_trial_logs_at_all(self):
        for content in (b"", b"hello", b"hello\n", b"{}\n", b"[1]\n", b"\x00\xff" * 999, (HERE / "cases.json").read_bytes(),
                        gzip.compress(b"x")):
            with self.subTest(content[:10]):
                self.refused_as(content, "trial log")

    def test_windows_line_ends_are_fine(self):
        self.log.write_bytes(b"".join(self.lines).replace(b"\n", b"\r\n"))
        out, _ = self.bench("--trials", 2)
        self.assertIn("already logged 18, ran 0", out)
        self.report()

    def test_resume_line_without_its_keys(self):
        self.refused_as(self.changed(2, workers="two"), "line 2: `workers`")

    def test_log_where_json_is_wanted_is_named_as_one(self):
        for module, args in ((harness, ["run", "--recording", self.log, "--out", "o.json"]), (report, [self.log, "--baseline", self.log])):
            self.assertIn("is a trial log: report.py reads it", self.refused_inside(module, *args))

    def test_half_of_a_row_that_is_json_is_not_forgiven(self):
        self.refused_as(b"".join(self.lines) + b"12", f"line {len(self.lines) + 1}: it is not a trial")


class Outages(BenchTest):
    """A trial is a result only if the model was asked."""

    def scripted(self, script, *args, **kwargs):
        (self.folder / "script.txt").write_text(script)
        return self.bench("--cases", self.cases_file(case()), *args, system="systems:scripted", **kwargs)

    def test_server_that_is_not_there_is_an_error_at_once(self):
        began = time.monotonic()
        out, err = self.scripted("away", status=1)
        self.assertLess(time.monotonic() - began, 20)
        self.assertEqual(out, "quick: planned 10, already logged 0, ran 0, not run 10\n")
        self.assertEqual(err, "error: the server is away\n")
        self.assertEqual(self.rows(), [])

    def test_patience_begins_with_the_first_failure(self):
        def pause(seconds):
            paused.append(seconds)
            return True
        paused, answers = [], iter([harness.Busy("b"), "answer"])

        def ask():
            time.sleep(0.2)    # longer than the patience
            if isinstance(answer := next(answers), Exception):
                raise answer
            return answer
        self.assertEqual(bench.patiently(ask, harness.Busy, 0.1, pause)[0], "answer")
        self.assertEqual(len(paused), 1)

    def test_metadata_of_the_system_is_left_alone(self):
        (self.folder / "shared.py").write_text(SYSTEMS + """
shared = {"session": "mine"}
class Once(Scripted):
    def respond(self, case, trial):
        return harness.Answer(self.output(case, trial), shared)
once = Once()
""")
        (self.folder / "script.txt").write_text("ok busy:0 ok")
        self.bench("--trials", 3, "--cases", self.cases_file(case()), system="shared:once")
        self.assertEqual([row["metadata"] for row in self.rows()][::2], [{"session": "mine"}] * 2)

    def test_outage_is_waited_out_and_shows_in_the_trials_metadata(self):
        out, _ = self.scripted("ok away ok", "--trials", 3)
        self.assertEqual(out, "quick: planned 3, already logged 0, ran 3, not run 0\n")
        rows = self.rows()
        self.assertEqual([row["metadata"].get("waits") for row in rows], [None, 1, None])
        self.assertGreaterEqual(rows[1]["metadata"]["waited_s"], 0.9)
        self.assertLess(rows[1]["latency_s"], 0.9)

    def test_patience_spent_leaves_trials_unrun_and_the_same_command_resumes(self):
        out, err = self.scripted("ok ok away", "--patience-s", "0.1", status=1)
        self.assertEqual(out, "quick: planned 10, already logged 0, ran 2, not run 8\n")
        self.assertEqual(err, "error: the server is away (kept trying for 0.1 s; the same command resumes)\n")
        out, _ = self.scripted("ok")
        self.assertEqual(out, "quick: planned 10, already logged 2, ran 8, not run 0\n")

    def test_busy_is_waited_out_even_before_the_first_trial(self):
        out, _ = self.scripted("busy:0.05 busy:0.05 ok", "--trials", 2)
        self.assertEqual(out, "quick: planned 2, already logged 0, ran 2, not run 0\n")
        self.assertEqual(self.rows()[0]["metadata"]["waits"], 2)

    def test_busy_without_end_spends_the_patience(self):
        _, err = self.scripted("ok busy", "--patience-s", "0.1", status=1)
        self.assertIn("the server is busy (kept trying for 0.1 s", err)

    def test_budget_ends_the_waiting_too(self):
        out, _ = self.scripted("ok away", "--budget-s", "0.3")
        self.assertEqual(out, "quick: planned 10, already logged 0, ran 1, not run 9 (stopped by the time budget)\n")

    def test_pause_grows_from_one_second_to_thirty_and_retry_after_to_120(self):
        away = harness.Unavailable("away")
        self.assertEqual([bench.pause_before_retry(away, waits) for waits in range(7)], [1, 2, 4, 8, 16, 30, 30])
        self.assertEqual(bench.pause_before_retry(harness.Busy("busy", 7), 3), 7)
        self.assertEqual(bench.pause_before_retry(harness.Busy("busy", 9999), 3), 120)
        self.assertEqual(bench.pause_before_retry(harness.Busy("busy"), 1), 2)

    def test_server_failures_are_results_while_the_server_lives(self):
        (self.folder / "alive.txt").write_text("")
        out, _ = self.scripted("ReplyTimeout ConnectionCut ServerError MalformedReply ServerError ok")
        self.assertIn("ran 10, not run 0", out)
        self.assertEqual([row["error"]["types"][0] for row in self.rows() if "error" in row],
                         ["ReplyTimeout", "ConnectionCut", "ServerError", "MalformedReply", "ServerError"])

    def test_three_failures_in_a_row_without_a_sign_of_life_are_an_outage(self):
        out, err = self.scripted("ok ServerError ServerError ok ServerError", "--patience-s", "0.1", status=1)
        self.assertIn("gives no sign of life", err)
        self.assertEqual(out, "quick: planned 10, already logged 0, ran 7, not run 3\n")

    def test_rejected_input_does_not_hide_an_outage(self):
        (self.folder / "script.txt").write_text("ok " + "ReplyTimeout " * 40)
        cases = self.cases_file(case(), case(id="blank", expected=..., expected_error="ValueError"), case(id="two"))
        out, err = self.bench("--cases", cases, "--patience-s", "0.1", system="systems:scripted", status=1)
        self.assertIn("gives no sign of life", err)
        self.assertEqual(len([row for row in self.rows() if "error" in row and row["case_id"] != "blank"]), 3)

    def test_patience_begins_for_all_workers_with_the_first_answer(self):
        (self.folder / "hiccup.py").write_text(SYSTEMS + """
import threading
first = threading.Event()
def respond(case, trial):
    if trial == 0 and case["id"] == "two" and not first.is_set():
        time.sleep(0.3)
        first.set()
        raise harness.Unavailable("hiccup")
    return harness.Answer(case["expected"], {})
quick.respond = respond
""")
        cases = self.cases_file(case(), case(id="two"))
        out, _ = self.bench("--workers", 2, "--trials", 3, "--cases", cases, system="hiccup:quick")
        self.assertIn("ran 6, not run 0", out)

    def test_other_errors_never_ask_for_life(self):
        out, _ = self.scripted("TruncatedReply")
        self.assertIn("ran 10, not run 0", out)


# What a real Ollama server (0.32.15) answered, byte for byte: [status, content type, body], or null where it closed
# the connection without an answer.
EXCHANGES = {row["name"]: row["response"] for row in map(json.loads, r'''
{"name": "version", "response": [200, "application/json; charset=utf-8", "{\"version\":\"0.32.15\"}"]}
{"name": "tags", "response": [200, "application/json; charset=utf-8", "{\"models\":[{\"name\":\"gemma3:270m\",\"model\":\"gemma3:270m\",\"modified_at\":\"2026-11-30T20:04:25.364396024Z\",\"size\":253113619,\"digest\":\"1e8926610f2554a55efacf719c81faf50543ded363c87585511f5d92b02f2565\",\"details\":{\"parent_model\":\"\",\"format\":\"gguf\",\"family\":\"gemma3\",\"families\":[\"gemma3\"],\"parameter_size\":\"268.10M\",\"quantization_level\":\"Q4_K_M\",\"context_length\":32768,\"embedding_length\":640},\"capabilities\":[\"completion\"]},{\"name\":\"smollm2:135m\",\"model\":\"smollm2:135m\",\"modified_at\":\"2026-11-30T20:04:25.674794329Z\",\"size\":98362813,\"digest\":\"321f3f3d8581b20b92636ee10dcce285490002b7b795b40a0532150b6f9a04cd\",\"details\":{\"parent_model\":\"\",\"format\":\"gguf\",\"family\":\"llama\",\"families\":[\"llama\"],\"parameter_size\":\"134.52M\",\"quantization_level\":\"Q4_1\",\"context_length\":8192,\"embedding_length\":576},\"capabilities\":[\"completion\"]}]}"]}
{"name": "chat-gemma3-warm-same-seed", "response": [200, "application/json; charset=utf-8", "{\"model\":\"gemma3:270m\",\"created_at\":\"2026-11-30T20:04:27.37457063Z\",\"message\":{\"role\":\"assistant\",\"content\":\"{\\n  \\\"category\\\": \\\"billing\\\",\\n  \\\"needs_human\\\": true\\n}\"},\"done\":true,\"done_reason\":\"stop\",\"total_duration\":668621596,\"load_duration\":979594,\"prompt_eval_count\":62,\"prompt_eval_duration\":49744000,\"eval_count\":21,\"eval_duration\":614501000}"]}
{"name": "chat-gemma3-num-predict-3", "response": [200, "application/json; charset=utf-8", "{\"model\":\"gemma3:270m\",\"created_at\":\"2026-11-30T20:04:28.826963998Z\",\"message\":{\"role\":\"assistant\",\"content\":\"{\\n  \"},\"done\":true,\"done_reason\":\"length\",\"total_duration\":139794732,\"load_duration\":991402,\"prompt_eval_count\":62,\"prompt_eval_duration\":54980000,\"eval_count\":3,\"eval_duration\":80041000}"]}
{"name": "no-messages-just-loads", "response": [200, "application/json; charset=utf-8", "{\"model\":\"gemma3:270m\",\"created_at\":\"2026-11-30T20:04:32.808678915Z\",\"message\":{\"role\":\"assistant\",\"content\":\"\"},\"done\":true,\"done_reason\":\"load\"}"]}
{"name": "unknown-model-chat", "response": [404, "application/json; charset=utf-8", "{\"error\":\"model 'nope:1b' not found\"}"]}
{"name": "think-true-on-nonthinking", "response": [400, "application/json; charset=utf-8", "{\"error\":\"\\\"gemma3:270m\\\" does not support thinking\"}"]}
{"name": "format-schema-bad-pattern", "response": [400, "application/json; charset=utf-8", "{\"error\":\"{\\\"error\\\":{\\\"code\\\":400,\\\"message\\\":\\\"Field 'json_schema': \\\\\\\"json_schema\\\\\\\": JSON schema conversion failed:\\\\nPattern must start with '^' and end with '$'\\\",\\\"type\\\":\\\"invalid_request_error\\\"}}\"}"]}
{"name": "format-bogus-string", "response": [500, "application/json; charset=utf-8", "{\"error\":\"invalid format: \\\"\\\\\\\"yaml\\\\\\\"\\\"; expected \\\"json\\\" or a valid JSON Schema object\"}"]}
{"name": "wrong-type-option-string", "response": [500, "application/json; charset=utf-8", "{\"error\":\"option \\\"temperature\\\" must be of type float32\"}"]}
{"name": "malformed-json", "response": [400, "application/json; charset=utf-8", "{\"error\":\"unexpected EOF\"}"]}
{"name": "wrong-path", "response": [404, "text/plain", "404 page not found"]}
{"name": "bad-host-header", "response": [403, null, ""]}
{"name": "context-overflow-single-long-user-message-default", "response": [200, "application/json; charset=utf-8", "{\"model\":\"gemma3:270m\",\"created_at\":\"2026-11-30T20:05:08.930008488Z\",\"message\":{\"role\":\"assistant\",\"content\":\"{ \\\"category\\\": \\\"account\\\",\\\"needs_human\\\": true}\"},\"done\":true,\"done_reason\":\"stop\",\"total_duration\":5781153921,\"load_duration\":5157397,\"prompt_eval_count\":2051,\"prompt_eval_duration\":4697683000,\"eval_count\":25,\"eval_duration\":1024228000}"]}
{"name": "context-overflow-truncate-false", "response": [400, "application/json; charset=utf-8", "{\"error\":\"{\\\"error\\\":{\\\"code\\\":400,\\\"message\\\":\\\"request (14159 tokens) exceeds the available context size (4096 tokens), try increasing it\\\",\\\"type\\\":\\\"exceed_context_size_error\\\",\\\"n_prompt_tokens\\\":14159,\\\"n_ctx\\\":4096}}\"}"]}
{"name": "token-repeat-guard-nonstream-200-done-false", "response": [200, "application/json; charset=utf-8", "{\"model\":\"smollm2:135m\",\"created_at\":\"2026-11-30T20:09:02.863760614Z\",\"message\":{\"role\":\"assistant\",\"content\":\"no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no\"},\"done\":false}"]}
{"name": "runner-SIGKILL-mid-generation-nonstream", "response": [500, "application/json; charset=utf-8", "{\"error\":\"an error was encountered while running the model: unexpected EOF\"}"]}
{"name": "server-SIGTERM-mid-generation-nonstream", "response": null}
{"name": "v1-models", "response": [200, "application/json", "{\"object\":\"list\",\"data\":[{\"id\":\"gemma3:270m\",\"object\":\"model\",\"created\":1796069065,\"owned_by\":\"library\"},{\"id\":\"smollm2:135m\",\"object\":\"model\",\"created\":1796069065,\"owned_by\":\"library\"}]}"]}
{"name": "v1-chat-json-schema", "response": [200, "application/json", "{\"id\":\"chatcmpl-416\",\"object\":\"chat.completion\",\"created\":1796069247,\"model\":\"gemma3:270m\",\"system_fingerprint\":\"fp_ollama\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"{\\n  \\\"category\\\": \\\"billing\\\",\\n  \\\"needs_human\\\": true\\n  }\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":62,\"completion_tokens\":22,\"total_tokens\":84}}"]}
{"name": "v1-chat-max-tokens-3", "response": [200, "application/json", "{\"id\":\"chatcmpl-309\",\"object\":\"chat.completion\",\"created\":1796069249,\"model\":\"gemma3:270m\",\"system_fingerprint\":\"fp_ollama\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"{\\n  \"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":62,\"completion_tokens\":3,\"total_tokens\":65}}"]}
{"name": "v1-unknown-model", "response": [404, "application/json", "{\"error\":{\"message\":\"model 'nope:1b' not found\",\"type\":\"not_found_error\",\"param\":null,\"code\":null}}"]}
{"name": "v1-bad-schema", "response": [400, "application/json", "{\"error\":{\"message\":\"{\\\"error\\\":{\\\"code\\\":400,\\\"message\\\":\\\"Field 'json_schema': \\\\\\\"json_schema\\\\\\\": JSON schema conversion failed:\\\\nUnrecognized schema: {\\\\\\\"type\\\\\\\":\\\\\\\"bananas\\\\\\\"}\\\",\\\"type\\\":\\\"invalid_request_error\\\"}}\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}"]}
{"name": "v1-missing-model", "response": [400, "application/json", "{\"error\":{\"message\":\"model is required\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}"]}
{"name": "v1-token-repeat-guard-nonstream", "response": [200, "application/json", "{\"id\":\"chatcmpl-623\",\"object\":\"chat.completion\",\"created\":1796069343,\"model\":\"smollm2:135m\",\"system_fingerprint\":\"fp_ollama\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no\"},\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":0,\"completion_tokens\":0,\"total_tokens\":0}}"]}
{"name": "v1-runner-SIGKILL-nonstream", "response": [500, "application/json", "{\"error\":{\"message\":\"an error was encountered while running the model: unexpected EOF\",\"type\":\"api_error\",\"param\":null,\"code\":null}}"]}
{"name": "pseudothinking-think-absent-format", "response": [200, "application/json; charset=utf-8", "{\"model\":\"pseudothink:135m\",\"created_at\":\"2026-11-30T20:18:45.086467509Z\",\"message\":{\"role\":\"assistant\",\"content\":\"\",\"thinking\":\"In this issue, you can add an error with `false` in the format of JSON, which cannot be represented in a standard JSON. You should also check the type of the JSON that contains the message and validate if it is valid JSON (which is not JSON). Also, check if you have a refund policy\"},\"done\":true,\"done_reason\":\"length\",\"total_duration\":613422522,\"load_duration\":1081055,\"prompt_eval_count\":74,\"prompt_eval_duration\":9472000,\"eval_count\":64,\"eval_duration\":599852000}"]}
{"name": "pseudothinking-think-false-format", "response": [200, "application/json; charset=utf-8", "{\"model\":\"pseudothink:135m\",\"created_at\":\"2026-11-30T20:18:44.464136701Z\",\"message\":{\"role\":\"assistant\",\"content\":\"{\\n    \\\"category\\\": \\\"billing\\\",\\n    \\\"needs_human\\\": true\\n}\"},\"done\":true,\"done_reason\":\"stop\",\"total_duration\":967998303,\"load_duration\":551881869,\"prompt_eval_count\":79,\"prompt_eval_duration\":224066000,\"eval_count\":19,\"eval_duration\":188265000}"]}
{"name": "v1-pseudothinking-default", "response": [200, "application/json", "{\"id\":\"chatcmpl-24\",\"object\":\"chat.completion\",\"created\":1796069925,\"model\":\"pseudothink:135m\",\"system_fingerprint\":\"fp_ollama\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"\",\"reasoning\":\"Available roles: administrators, customers, payment managers\\nRequirements: \\nAvailable tasks: booking\\n\"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":74,\"completion_tokens\":20,\"total_tokens\":94}}"]}
{"name": "max-queue-2-cold-2", "response": [503, "application/json; charset=utf-8", "{\"error\":\"server busy, please try again.  maximum pending requests exceeded\"}"]}
'''.strip().splitlines())}

class ModelServer(http.server.ThreadingHTTPServer):
    """A server on this machine that answers as `answer(request)` says, and keeps what it was asked.

    A request is a dict of method, path, headers and body. An answer is (status, content type, body[, headers]);
    None closes the connection without a byte; a callable gets the handler and does as it likes.
    """
    daemon_threads = True

    def __init__(self, answer):
        self.answer, self.requests, self.inside, self.most_inside = answer, [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), ModelHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Clients that hang up are what these tests are about."""

    def chats(self):
        """The bodies of the requests for an answer, the warm-up apart."""
        return [request["body"] for request in self.requests if request["method"] == "POST"
                and request["body"].get("messages") and request["body"].get("max_tokens") != 1]


class ModelHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = {"method": self.command, "path": self.path, "headers": dict(self.headers),
                   "body": json.loads(body) if body else None}
        with self.server.lock:
            self.server.requests.append(request)
            self.server.inside += 1
            self.server.most_inside = max(self.server.most_inside, self.server.inside)
        try:
            answer = self.server.answer(request)
            if answer is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif callable(answer):
                answer(self)
            else:
                self.reply(*answer)
        finally:
            with self.server.lock:
                self.server.inside -= 1

    do_GET = do_POST

    def reply(self, status, content_type, body, headers=()):
        data = body if isinstance(body, bytes) else body.encode()
        head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *(f"{key}: {value}" for key, value in headers)]
        head += [f"Content-Type: {content_type}"] if content_type else []
        self.wfile.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)

    def log_message(self, *args):
        """Quiet."""


def chat(content='{"category": "billing", "needs_human": true}', finish_reason="stop", **message):
    """An OpenAI-compatible answer."""
    return 200, "application/json", json.dumps({
        "model": "m", "choices": [{"message": {"role": "assistant", "content": content} | message,
                                   "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 7}, "system_fingerprint": "fp"})


MODELS = 200, "application/json", '{"data": [{"id": "m"}]}'


class ServerTest(BenchTest):

    def serve(self, answer):
        server = ModelServer(answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def serve_openai(self, answer):
        """Serve the model m: /v1/models, the warm-up, and chats answered by `answer(request)`."""
        return self.serve(lambda request: MODELS if request["path"] == "/v1/models"
                          else chat() if (request["body"] or {}).get("max_tokens") == 1 else answer(request))

    def serve_ollama(self, chat_exchange, **others):
        """Serve what Ollama answered: `chat_exchange` to every chat, the rest by path."""
        paths = {"/api/version": EXCHANGES["version"], "/api/tags": EXCHANGES["tags"]} | others

        def answer(request):
            if request["path"] == "/api/chat" and not request["body"]["messages"]:
                return EXCHANGES["no-messages-just-loads"]
            return paths.get(request["path"]) or (EXCHANGES[chat_exchange] if request["path"] == "/api/chat"
                                                  else EXCHANGES["wrong-path"])
        return self.serve(answer)

    def openai(self, server, *args, **kwargs):
        return self.bench("--endpoint", server if isinstance(server, str) else server.url, *args,
                          system="model_triage:openai=m", **kwargs)

    def respond(self, system):
        """Ask a system in this process; return its Answer or what it raised."""
        try:
            return system.respond(case(), 3)
        except Exception as error:
            return error
        finally:
            system.close()

    def openai_error(self, answer, **options):
        server = self.serve(lambda request: answer)
        return self.respond(model_triage.openai("m", endpoint=server.url, **options))

    def ollama_error(self, exchange, **options):
        server = self.serve(lambda request: EXCHANGES[exchange])
        return self.respond(model_triage.OllamaSystem("x", "gemma3:270m", "0" * 12, endpoint=server.url, **options))


class OllamaServers(ServerTest):
    """The real client against what a real Ollama server answered."""

    def test_run_on_any_installed_model(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        out, _ = self.bench("--trials", 2, "--endpoint", server.url, system="model_triage:ollama=gemma3:270m")
        self.assertEqual(out, "model-triage-gemma3:270m: planned 18, already logged 0, ran 18, not run 0\n")
        header = bench.TrialLog(self.log).header
        self.assertEqual(header["system"]["model"], "gemma3:270m@1e8926610f25")
        self.assertEqual((header["server"], header["endpoint"]), ("ollama 0.32.15", server.url))
        self.assertEqual(self.rows()[0]["output"], {"category": "billing", "needs_human": True})
        self.assertEqual(self.rows()[9]["metadata"], {
            "seed": 1001, "temperature": 1.0, "model": "gemma3:270m", "server": "ollama 0.32.15", "tokens_in": 62,
            "tokens_out": 21, "load_s": 0.000979594, "prompt_s": 0.049744, "generation_s": 0.614501, "stop_reason": "stop",
            "session": 0})

    def test_request_is_the_one_described(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        self.bench("--trials", 2, "--endpoint", server.url, system="model_triage:ollama=gemma3:270m")
        chats = server.chats()
        self.assertEqual(len(chats), 14)    # blank and missing input ask no model
        self.assertEqual([body["options"]["seed"] for body in chats], [1000] * 7 + [1001] * 7)
        body = chats[0]
        self.assertEqual([message["role"] for message in body.pop("messages")], ["system", "user"])
        self.assertEqual(body, {"model": "gemma3:270m", "stream": False, "think": False, "truncate": False,
                                "format": triage_task.SCHEMA,
                                "options": {"temperature": 1.0, "num_predict": 64, "seed": 1000}})

    def test_model_is_loaded_before_the_first_trial_unless_told_otherwise(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        self.bench("--trials", 1, "--endpoint", server.url, system="model_triage:ollama=gemma3:270m")
        posts = [request["body"] for request in server.requests if request["method"] == "POST"]
        self.assertEqual(posts[0], {"model": "gemma3:270m", "messages": [], "stream": False,
                                    "options": {"temperature": 1.0, "num_predict": 64, "seed": 1000}})
        self.assertEqual(len(posts), 8)
        self.log.unlink()
        server.requests.clear()
        self.bench("--trials", 1, "--no-warmup", "--endpoint", server.url, system="model_triage:ollama=gemma3:270m")
        self.assertEqual(len([request for request in server.requests if request["method"] == "POST"]), 7)

    def test_pinned_models_run_at_their_digest_and_at_no_other(self):
        tags = json.loads(EXCHANGES["tags"][2])
        for name, tag, digest in (("gemma", "gemma4:e2b", "b37049369adf"), ("qwen", "qwen3.5:0.8b", "de63045f2975")):
            with self.subTest(name):
                self.log.unlink(missing_ok=True)
                tags["models"][0] |= {"name": tag, "digest": digest + "0" * 52}
                server = self.serve_ollama("chat-gemma3-warm-same-seed",
                                           **{"/api/tags": (200, "application/json", json.dumps(tags))})
                self.bench("--trials", 1, "--endpoint", server.url, system=f"model_triage:{name}")
                self.assertEqual(bench.TrialLog(self.log).header["system"]["model"], f"{tag}@{digest}")
                self.log.unlink()
                tags["models"][0]["digest"] = "f" * 64
                server = self.serve_ollama("chat-gemma3-warm-same-seed",
                                           **{"/api/tags": (200, "application/json", json.dumps(tags))})
                error = self.refused("bench.py", "--log", self.log, "--endpoint", server.url,
                                     "--system", f"model_triage:{name}")
                self.assertIn(f"ffffffffffff, not {digest}", error)
                self.assertFalse(self.log.exists())

    def test_names_of_the_pinned_systems(self):
        self.assertEqual([model_triage.gemma.name, model_triage.qwen.name], ["model-triage-gemma4", "model-triage-qwen3.5"])

    def test_model_that_is_not_installed_is_named_with_what_to_do(self):
        server = self.serve_ollama("unknown-model-chat")
        for tag in ("nope:1b", "gemma3"):
            error = self.refused("bench.py", "--log", self.log, "--endpoint", server.url,
                                 "--system", f"model_triage:ollama={tag}")
            self.assertIn("run `ollama pull", error)
            self.assertIn("gemma3:270m, smollm2:135m", error)
        self.assertIn("gemma3:latest", error)

    def test_server_that_does_not_answer_says_how_to_start_it(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for system, said in (("model_triage:gemma", "ollama serve"), ("model_triage:ollama=x", "ollama serve"),
                             ("model_triage:openai=x", "--endpoint URL")):
            error = self.refused("bench.py", "--log", self.log, "--system", system,
                                 "--endpoint", f"http://127.0.0.1:{port}")
            self.assertIn(f"127.0.0.1:{port} cannot be reached", error)
            self.assertIn(said, error)
            self.assertFalse(self.log.exists())

    def test_endpoint_that_is_not_ollama(self):
        server = self.serve(lambda request: (200, "application/json", "[]"))
        self.assertIn("/api/tags", self.refused("bench.py", "--log", self.log, "--endpoint", server.url,
                                                "--system", "model_triage:ollama=x"))

    def test_every_answer_that_was_seen_has_its_name(self):
        for exchange, kind, said in (
                ("chat-gemma3-num-predict-3", "TruncatedReply", "token limit"),
                ("unknown-model-chat", "NotFound", "model 'nope:1b' not found"),
                ("think-true-on-nonthinking", "BadRequest", '"gemma3:270m" does not support thinking'),
                ("format-schema-bad-pattern", "BadRequest", "JSON schema conversion failed"),
                ("format-bogus-string", "ServerError", "invalid format"),
                ("wrong-type-option-string", "ServerError", "must be of type float32"),
                ("malformed-json", "BadRequest", "unexpected EOF"),
                ("wrong-path", "NotFound", "404 page not found"),
                ("bad-host-header", "Denied", "answered 403"),
                ("context-overflow-truncate-false", "BadRequest", "exceeds the available context size (4096 tokens)"),
                ("token-repeat-guard-nonstream-200-done-false", "UnfinishedReply", "without finishing"),
                ("runner-SIGKILL-mid-generation-nonstream", "ServerError", "unexpected EOF"),
                ("server-SIGTERM-mid-generation-nonstream", "ConnectionCut", "lost"),
                ("pseudothinking-think-absent-format", "TruncatedReply", "the tokens went into thinking"),
                ("max-queue-2-cold-2", "Busy", "server busy, please try again")):
            with self.subTest(exchange):
                error = self.ollama_error(exchange)
                self.assertEqual(type(error).__name__, kind)
                self.assertIn(said, str(error))
        self.assertEqual(self.ollama_error("pseudothinking-think-false-format").metadata["load_s"], 0.551881869)

    def test_text_that_was_received_is_kept_with_the_error(self):
        self.assertEqual(self.ollama_error("chat-gemma3-num-predict-3").text, "{\n  ")
        self.assertTrue(self.ollama_error("token-repeat-guard-nonstream-200-done-false").text.startswith("no no"))
        self.assertTrue(self.ollama_error("pseudothinking-think-absent-format").text.startswith("In this issue"))

    def test_finished_log_needs_no_server_to_be_called_finished(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        system = "model_triage:ollama=gemma3:270m"
        self.bench("--trials", 1, "--endpoint", server.url, system=system)
        before = self.log.read_bytes()
        down = ["--endpoint", "http://127.0.0.1:9", "--trials", 1]
        out, err = self.bench(*down, system=system)
        self.assertEqual(out, "model-triage-gemma3:270m: planned 9, already logged 9, ran 0, not run 0\n")
        self.assertIn("nothing to run", err)
        for other in (["--temperature", "0.5"], ["--trials", "2"]):
            self.assertIn("cannot be reached", self.refused("bench.py", "--system", system, "--log", self.log, *down, *other))
        self.assertEqual(self.log.read_bytes(), before)

    def test_tag_without_latest_finds_the_model_that_is_listed_with_it(self):
        tags = json.loads(EXCHANGES["tags"][2])
        tags["models"][0]["name"] = "gemma3:latest"
        server = self.serve_ollama("chat-gemma3-warm-same-seed", **{"/api/tags": (200, "application/json", json.dumps(tags))})
        self.bench("--trials", 1, "--endpoint", server.url, system="model_triage:ollama=gemma3")
        self.assertEqual(bench.TrialLog(self.log).header["system"]["model"], "gemma3@1e8926610f25")

    def test_prompt_that_was_cut_shows_in_its_count_alone(self):
        answer = self.ollama_error("context-overflow-single-long-user-message-default")    # so `truncate` false is asked for
        self.assertEqual(answer.metadata["tokens_in"], 2051)

    def test_load_answer_to_a_real_chat_is_empty_and_not_a_result_with_zero_tokens(self):
        error = self.ollama_error("no-messages-just-loads")
        self.assertEqual(type(error).__name__, "EmptyReply")
        self.assertNotIn("tokens_in", error.metadata)

    def test_think_and_options_reach_the_request(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        self.bench("--trials", 1, "--endpoint", server.url, "--think", "on", "--top-p", "0.5", "--max-tokens", 7,
                   "--format", "json", "--temperature", "0.25", "--extra-body", '{"options": {"top_k": 3}, "keep_alive": 9}',
                   system="model_triage:ollama=gemma3:270m")
        body = server.chats()[0]
        self.assertEqual((body["think"], body["format"], body["keep_alive"]), (True, "json", 9))
        self.assertEqual(body["options"], {"temperature": 0.25, "num_predict": 7, "seed": 1000, "top_p": 0.5, "top_k": 3})

    def test_ollama_host_is_read_as_ollama_reads_it(self):
        for host, url in (("", "http://127.0.0.1:11434"), ("box", "http://box:11434"), ("box:1234", "http://box:1234"),
                          (":5000", "http://127.0.0.1:5000"), ("http://box", "http://box:80"), ("https://box", "https://box:443"),
                          ("http://box:9", "http://box:9"), ("[::1]:11434", "http://[::1]:11434"), ("::1", "http://[::1]:11434"),
                          ("[::1]", "http://[::1]:11434"), ("http://box/a/b", "http://box:80/a/b"), ("box/p", "http://box:11434/p"),
                          (" '1.2.3.4' ", "http://1.2.3.4:11434"), ("1.2.3.4:99999", "http://1.2.3.4:11434")):
            self.assertEqual(model_triage.ollama_endpoint(host), url, host)
        for host, asked in (("0.0.0.0:5000", "127.0.0.1"), ("[::]:5000", "::1"), ("box", "box")):
            self.assertEqual(model_triage.Server(model_triage.ollama_endpoint(host), 1, "").host, asked)

    def test_ollama_host_is_used_and_endpoint_overrides_it(self):
        server = self.serve_ollama("chat-gemma3-warm-same-seed")
        self.bench("--trials", 1, system="model_triage:ollama=gemma3:270m", env={"OLLAMA_HOST": server.url})
        self.bench("--trials", 1, "--endpoint", server.url, system="model_triage:ollama=gemma3:270m",
                   env={"OLLAMA_HOST": "127.0.0.1:1"})


class OpenAIServers(ServerTest):
    INSIDE = True

    def test_run_over_an_openai_compatible_server(self):
        server = self.serve_openai(lambda request: chat())
        out, _ = self.openai(server.url + "/v1/", "--trials", 2)
        self.assertEqual(out, "model-triage-m: planned 18, already logged 0, ran 18, not run 0\n")
        body = server.chats()[7]
        self.assertEqual([message["role"] for message in body.pop("messages")], ["system", "user"])
        self.assertEqual(body.pop("response_format")["json_schema"]["schema"], triage_task.SCHEMA)
        self.assertEqual(body, {"model": "m", "temperature": 1.0, "max_tokens": 64, "seed": 1001})
        self.assertEqual({request["path"] for request in server.requests}, {"/v1/models", "/v1/chat/completions"})
        self.assertEqual(self.rows()[0]["metadata"], {"seed": 1000, "temperature": 1.0, "tokens_in": 12, "tokens_out": 7,
                                                      "model": "m", "server": "fp", "stop_reason": "stop", "session": 0})

    def test_every_answer_of_ollamas_v1_that_was_seen_has_its_name(self):
        for exchange, kind, said in (
                ("v1-chat-max-tokens-3", "TruncatedReply", "token limit"),
                ("v1-unknown-model", "NotFound", "model 'nope:1b' not found"),
                ("v1-bad-schema", "BadRequest", "Unrecognized schema"),
                ("v1-missing-model", "BadRequest", "model is required"),
                ("v1-token-repeat-guard-nonstream", "UnfinishedReply", "without finishing"),
                ("v1-runner-SIGKILL-nonstream", "ServerError", "unexpected EOF"),
                ("v1-pseudothinking-default", "TruncatedReply", "the tokens went into thinking")):
            with self.subTest(exchange):
                error = self.openai_error(EXCHANGES[exchange])
                self.assertEqual(type(error).__name__, kind)
                self.assertIn(said, str(error))
        answer = self.openai_error(EXCHANGES["v1-chat-json-schema"])
        self.assertEqual(answer.output, {"category": "billing", "needs_human": True})
        self.assertNotIn("tokens_in", self.openai_error(EXCHANGES["v1-token-repeat-guard-nonstream"]).metadata)

    def test_where_several_faults_hold_the_first_in_order_names_it(self):
        for kind, answer in (("RefusedReply", chat("", "length", refusal="I cannot")),
                             ("RefusedReply", chat("half", "content_filter")),
                             ("UnfinishedReply", chat("", None)), ("TruncatedReply", chat("", "length")),
                             ("TruncatedReply", chat("{", "length")), ("EmptyReply", chat(" \n", "stop")),
                             ("EmptyReply", chat(None, "stop", reasoning_content="hm")), ("JSONDecodeError", chat("{", "stop")),
                             ("JSONDecodeError", chat("```json\n{}\n```", "stop"))):
            with self.subTest(kind):
                self.assertEqual(type(self.openai_error(answer)).__name__, kind)
        self.assertIn("tokens went into thinking", str(self.openai_error(chat("", "stop", reasoning="hm"))))

    def test_what_is_no_reply_at_all_has_a_name_too(self):
        for kind, answer in (
                ("MalformedReply", (200, "application/json", "{}")), ("MalformedReply", (200, "application/json", "[]")),
                ("MalformedReply", (200, "text/html", "<html>hello")), ("MalformedReply", (200, "application/json", "NaN")),
                ("MalformedReply", (200, "application/json", '{"choices": []}')),
                ("MalformedReply", chat(["parts"])), ("MalformedReply", (200, "application/json", b"\xff\xfe")),
                ("MalformedReply", (200, "text/plain", b"x" * (16 * 2 ** 20 + 1))),
                ("MalformedReply", lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n\r\n") and handler.connection.close()),
                ("ServerError", (500, "text/plain", "")), ("ServerError", (599, "text/plain", "x")),
                ("BadRequest", (400, "text/plain", "bad")), ("BadRequest", (422, "application/json", '{"detail": "bad"}')),
                ("Denied", (401, "text/plain", "")), ("Denied", (403, "text/plain", "")),
                ("NotFound", (404, "text/plain", "")), ("Busy", (429, "text/plain", "")), ("Busy", (503, "text/plain", "")),
                ("ConnectionCut", None)):
            with self.subTest((kind, str(answer)[:40])):
                error = self.openai_error(answer)
                self.assertEqual(type(error).__name__, kind, error)

    def test_connection_lost_in_the_middle_of_the_answer(self):
        def half(handler):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"half\":")
            handler.close_connection = True

        def half_chunked(handler):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"hal")
            handler.close_connection = True
        for answer in (half, half_chunked):
            self.assertEqual(type(self.openai_error(answer)).__name__, "ConnectionCut")

    def test_chunked_answer_is_read(self):
        def chunked(handler):
            body = chat()[2].encode()
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for start in range(0, len(body), 50):
                part = body[start:start + 50]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            handler.wfile.write(b"0\r\n\r\n")
        self.assertEqual(self.openai_error(chunked).output["category"], "billing")

    def test_text_kept_is_bounded_and_says_what_came(self):
        server = self.serve_openai(lambda request: chat("é" * 9000))
        self.openai(server, "--trials", 1)
        error = self.rows()[0]["error"]
        self.assertEqual((error["types"][0], error["text"]), ("JSONDecodeError", "é" * 4000))

    def test_any_bytes_a_model_can_return(self):
        odd = ['"a\\u2028\\u0085\\u001c"', '"\\ud800"', '"\\u0000"', "NaN", "9" * 5000, "[" * 5000 + "]" * 5000,
               json.dumps("x" * 2_000_000), '{"category": NaN}', "null", '"\u2028\x85中"']
        server = self.serve_openai(lambda request: chat(odd[request["body"]["seed"] - 1000]))
        cases = self.cases_file(case())
        self.openai(server, "--cases", cases, "--trials", len(odd))
        self.assertEqual([row["error"]["types"][0] if "error" in row else row["output"] for row in self.rows()],
                         ["a\u2028\x85\x1c", "\ud800", "\x00", "JSONDecodeError", "JSONDecodeError", "JSONDecodeError",
                          "x" * 2_000_000, "JSONDecodeError", None, "\u2028\x85中"])
        self.report(self.log, "--cases", cases)

    def test_usable_answer_is_not_thrown_away_for_bad_side_data(self):
        body = json.loads(chat()[2])
        for changes in ({"usage": [1]}, {"usage": None}, {"timings": {"prompt_ms": None}}, {"timings": 3}, {"model": []},
                        {"system_fingerprint": {}}, {"usage": {"prompt_tokens": "9"}}, {"timings": {"prompt_ms": 10 ** 400}}):
            answer = self.openai_error((200, "application/json", json.dumps(body | changes)))
            self.assertEqual(answer.output, {"category": "billing", "needs_human": True}, changes)
        parts = [{"type": "text", "text": '{"category": "billing", '}, {"type": "text", "text": '"needs_human": true}'}]
        self.assertEqual(self.openai_error(chat(parts, refusal=False)).output["category"], "billing")

    def test_what_llama_cpp_measured_is_kept_in_seconds(self):
        body = json.loads(chat()[2]) | {"timings": {"prompt_n": 9, "prompt_ms": 337.093, "predicted_ms": 239.318}}
        metadata = self.openai_error((200, "application/json", json.dumps(body))).metadata
        self.assertEqual((metadata["prompt_s"], metadata["generation_s"]), (0.337093, 0.239318))

    def test_sign_of_life_has_a_timeout_of_its_own(self):
        before, model_triage.ALIVE_TIMEOUT_S = model_triage.ALIVE_TIMEOUT_S, 0.2
        self.addCleanup(setattr, model_triage, "ALIVE_TIMEOUT_S", before)
        server = self.serve(lambda request: lambda handler: time.sleep(1))
        began = time.monotonic()
        self.assertFalse(model_triage.openai("m", endpoint=server.url).alive())
        self.assertLess(time.monotonic() - began, 0.9)

    def test_warm_up_that_takes_too_long_is_waited_for(self):
        server = self.serve(lambda request: lambda handler: time.sleep(0.6))
        system = model_triage.openai("m", endpoint=server.url, timeout_s=0.1)
        with self.assertRaisesRegex(harness.Busy, "still loading"):
            system.warm_up()

    def test_thinking_is_kept_where_no_text_came(self):
        for answer, kind in ((chat("", None, reasoning="hm"), "UnfinishedReply"), (chat(" \n", "length", reasoning="hm"), "TruncatedReply"),
                             (chat("", "content_filter", reasoning="hm"), "RefusedReply")):
            error = self.openai_error(answer)
            self.assertEqual((type(error).__name__, error.text), (kind, "hm"))

    def test_sign_of_life_is_any_answer_but_a_gateways(self):
        for answer, alive in ((MODELS, True), ((404, "text/plain", ""), True), ((401, "text/plain", ""), True),
                              ((500, "text/plain", ""), True), ((503, "text/plain", ""), True), ((200, "text/plain", "x"), True),
                              ((502, "text/plain", ""), False), ((504, "text/plain", ""), False), (None, False)):
            server = self.serve(lambda request: answer)
            system = model_triage.openai("m", endpoint=server.url)
            self.assertEqual(system.alive(), alive, answer)
            system.close()
        server.shutdown()
        server.server_close()
        self.assertFalse(model_triage.openai("m", endpoint=server.url).alive())

    def test_max_tokens_can_be_taken_out_for_servers_that_call_it_something_else(self):
        server = self.serve_openai(lambda request: chat())
        self.openai(server, "--trials", 1, "--extra-body", '{"max_tokens": null, "max_completion_tokens": 9}')
        bodies = [request["body"] for request in server.requests if request["body"]]
        self.assertEqual([(body.get("max_tokens"), body["max_completion_tokens"]) for body in bodies], [(None, 1)] + [(None, 9)] * 7)

    def test_model_that_the_server_does_not_serve_is_an_error_before_the_first_trial(self):
        server = self.serve(lambda request: EXCHANGES["v1-models"])
        error = self.refused("bench.py", "--log", self.log, "--endpoint", server.url, "--system", "model_triage:openai=m")
        self.assertIn("does not serve m; it serves gemma3:270m, smollm2:135m", error)
        self.assertFalse(self.log.exists())

    def test_server_that_does_not_list_its_models_is_used_all_the_same(self):
        for unlisted in ((404, "text/plain", ""), (500, "text/plain", ""), (200, "text/plain", "hi"), (200, "text/plain", "{}")):
            self.log.unlink(missing_ok=True)
            server = self.serve(lambda request: unlisted if request["path"] == "/v1/models" else chat())
            self.openai(server, "--trials", 1)

    def test_warm_up_is_one_token_and_in_no_trial(self):
        server = self.serve_openai(lambda request: chat())
        self.openai(server, "--trials", 1)
        tokens = [request["body"]["max_tokens"] for request in server.requests if request["method"] == "POST"]
        self.assertEqual(tokens, [1] + [64] * 7)
        self.openai(server, "--trials", 1)    # nothing to run: nothing is loaded
        self.assertEqual(len(server.requests), 9)

    def test_what_the_server_refuses_shows_before_the_first_trial(self):
        server = self.serve(lambda request: MODELS if request["method"] == "GET" else
                            (400, "application/json", '{"error": {"message": "no schema here"}}'))
        error = self.refused("bench.py", "--log", self.log, "--endpoint", server.url, "--system", "model_triage:openai=m")
        self.assertIn("no schema here", error)
        self.assertFalse(self.log.exists())

    def test_options_shape_the_request_and_the_identity(self):
        server = self.serve_openai(lambda request: chat())
        self.openai(server, "--trials", 1)
        before = self.log.read_bytes()
        for option, value, key in (("--temperature", "0.5", "temperature"), ("--max-tokens", "9", "max_tokens"),
                                   ("--top-p", "0.9", "top_p"), ("--format", "none", "format"),
                                   ("--extra-body", '{"top_k": 5}', "extra_body")):
            with self.subTest(option):
                error = self.refused_inside(bench, "--log", self.log, "--endpoint", server.url, "--trials", 1,
                                            "--system", "model_triage:openai=m", option, value)
                self.assertIn(f"system.sampling.{key}", error)
                self.assertEqual(self.log.read_bytes(), before)
                other = self.folder / "other.jsonl"
                other.unlink(missing_ok=True)
                self.run_script("bench.py", "--log", other, "--endpoint", server.url, "--trials", 1,
                                "--system", "model_triage:openai=m", option, value)
                body = server.chats()[-1]
                self.assertEqual(body.get("top_k" if key == "extra_body" else key),
                                 {"format": None, "extra_body": 5}.get(key, json.loads(value) if key != "format" else None))
                self.assertEqual("response_format" in body, key != "format")

    def test_endpoint_and_timeouts_are_no_part_of_the_identity(self):
        first, second = (self.serve_openai(lambda request: chat()) for _ in range(2))
        self.openai(first, "--budget-s", 0)
        out, _ = self.openai(second, "--timeout-s", 7, "--workers", 2)
        self.assertIn("already logged 0, ran 90", out)

    def test_extra_body_may_not_set_what_the_bench_sets(self):
        for body in ('{"seed": 1}', '{"messages": []}', '{"options": {"seed": 2}}', '{"stream": true}', '{"temperature": 0.1}', '{"truncate": true}',
                     '{"max_tokens": 5}', '{"response_format": {}}'):
            self.assertIn("the extra body sets", self.refused_inside(
                bench, "--system", "model_triage:openai=m", "--endpoint", "http://127.0.0.1:1", "--extra-body", body))

    def test_dry_run_where_no_case_has_a_message(self):
        cases = self.cases_file(case(input=" "))
        out, _ = self.openai("http://127.0.0.1:1", "--dry-run", "--cases", cases)
        self.assertEqual(out.count("\n"), 1)

    def test_dry_run_prints_the_plan_and_the_first_request_and_asks_nothing(self):
        out, _ = self.openai("http://127.0.0.1:1", "--dry-run", "--trials", 3)
        plan, _, body = out.partition("\n")
        self.assertEqual(plan, f"model-triage-m: planned 27, already logged 0, to run 27; log {self.log}")
        self.assertEqual((json.loads(body)["seed"], json.loads(body)["model"]), (1000, "m"))
        self.assertFalse(self.log.exists())
        server = self.serve_openai(lambda request: chat())
        self.openai(server, "--trials", 3, "--budget-s", 0)
        before = self.log.read_bytes()
        self.assertIn("already logged 0, to run 27", self.openai(server, "--trials", 3, "--dry-run")[0])
        self.assertEqual(self.log.read_bytes(), before)


class Transport(ServerTest):
    """Time, size, proxies, keys and redirects."""

    def test_endpoints_that_are_no_http_urls(self):
        for url in ("ftp://x", "localhost:8080", "http://", "http://x:99999", "http://x/?a=1", "http://a b", "x", "http://[::1", "http://" + "x" * 300):
            with self.subTest(url):
                self.assertIn("endpoint", self.refused_inside(bench, "--log", self.log, "--endpoint", url,
                                                              "--system", "model_triage:openai=m"))

    def test_endpoint_with_a_password_is_refused_with_a_pointer_to_the_key(self):
        error = self.refused("bench.py", "--log", self.log, "--endpoint", "http://me:secret-word@127.0.0.1:1",
                             "--system", "model_triage:openai=m")
        self.assertIn("BENCH_API_KEY", error)
        self.assertNotIn("secret-word", error)

    def test_unknown_host_and_failed_tls_are_unavailable(self):
        server = self.serve(lambda request: chat())
        for url in ("http://host.invalid", server.url.replace("http:", "https:"), "http://127.0.0.1:0"):
            with self.subTest(url[:40]):
                error = self.respond(model_triage.openai("m", endpoint=url, timeout_s=5))
                self.assertEqual(type(error).__name__, "Unavailable", error)

    def test_key_is_sent_and_shows_up_nowhere(self):
        key = "sk-very-secret-0123456789"
        answers = [(400, "application/json", json.dumps({"error": f"bad key {key}"})), (500, "text/plain", f"key {key}"),
                   (200, "text/plain", f"not json {key}"), chat()]
        server = self.serve_openai(lambda request: answers[(request["body"]["seed"] - 1000) % 4])
        out, err = self.openai(server, "--trials", 4, env={"BENCH_API_KEY": key})
        self.assertEqual({request["headers"].get("Authorization") for request in server.requests}, {f"Bearer {key}"})
        self.run_script("bench.py", "--log", self.log, "--convert", self.folder / "r.json")
        out += self.report()[1]
        for text in (out, err, self.log.read_text(), (self.folder / "r.json").read_text(),
                     (self.folder / "report.json").read_text()):
            self.assertNotIn("secret", text)
        self.assertIn("[BENCH_API_KEY]", self.log.read_text())

    def test_key_that_no_header_can_carry_is_refused_unseen(self):
        error = self.refused("bench.py", "--log", self.log, "--endpoint", "http://127.0.0.1:1", "--system",
                             "model_triage:openai=m", env={"BENCH_API_KEY": "secret\nword"})
        self.assertIn("BENCH_API_KEY", error)
        self.assertNotIn("secret", error)

    def test_key_in_whatever_a_server_sends_back_is_masked(self):
        key = 'sk/very"secret+0123456789'
        escaped = json.dumps(key)[1:-1].replace("/", "\\/")
        hidden = json.dumps({"category": key}).replace("secret", "\\u0073ecret")
        seen = [chat(hidden), (200, "application/json", json.dumps({key: 1})),
                (200, "application/json", json.dumps({"choices": [{"message": {}, "finish_reason": {key: 1}}]})),
                (400, "text/plain", "x" * 480 + " " + key), chat(f"Bearer {key}"), chat("", refusal=key), (200, "application/json", json.dumps({"choices": key})),
                (302, "text/plain", "", [("Location", f"/login?{key}")]), (400, "application/json", f'{{"error": "{escaped}"}}'),
                (500, "text/plain", key), (200, "text/plain", key), chat(json.dumps({"category": key}))]
        server = self.serve_openai(lambda request: seen[request["body"]["seed"] - 1000])
        out, err = self.openai(server, "--trials", len(seen), "--cases", self.cases_file(case()), env={"BENCH_API_KEY": key})
        for text in (out, err, self.log.read_text()):
            self.assertNotIn("secret", text)
        self.assertEqual([row["error"]["types"][0] if "error" in row else "output" for row in self.rows()],
                         ["output", "MalformedReply", "MalformedReply", "BadRequest",
                          "JSONDecodeError", "RefusedReply", "MalformedReply", "BadRequest", "BadRequest", "ServerError",
                          "MalformedReply", "output"])

    def test_placeholder_for_a_key_is_masked_in_errors_and_spoils_no_answer(self):
        server = self.serve_openai(lambda request: chat() if request["body"]["seed"] == 1000 else (400, "text/plain", "bad key other"))
        self.openai(server, "--trials", 2, "--cases", self.cases_file(case()), env={"BENCH_API_KEY": "other"})
        self.assertEqual(self.rows()[0]["output"], {"category": "billing", "needs_human": True})
        self.assertIn("bad key [BENCH_API_KEY]", self.rows()[1]["error"]["message"])

    def test_server_s_own_words_are_found_wherever_they_are(self):
        for body, said in (('{"error": null, "message": "m"}', "m"), ('[{"error": {"message": "m"}}]', "m"),
                           ('{"detail": [{"msg": "m", "loc": []}]}', "m"), ('{"error": "{\\"message\\": \\"m\\"}"}', "m"),
                           ("plain", "plain"), ("", "(no message)"), ("{}", "{}"), ("[]", "[]"), ("17", "17")):
            self.assertEqual(model_triage.server_message(body), said, body)

    def test_passwords_in_an_endpoint_are_never_shown_however_odd(self):
        for url in ("http://u:S3cret@h:1", "u:S3cret@h", "http://u:S3cr[et@h", "http://u:S3cret/x@h", "http:/u:S3cret@h",
                    "http://h/v1?key=S3cret"):
            self.assertNotIn("S3cr", self.refused_inside(bench, "--log", self.log, "--endpoint", url,
                                                         "--system", "model_triage:openai=m"))
        for host in ("http://u:S3cret@127.0.0.1:1", "u:S3cret@127.0.0.1"):
            self.assertNotIn("S3cret", self.refused("bench.py", "--system", "model_triage:gemma", env={"OLLAMA_HOST": host}))
        self.assertNotIn("S3cret", self.refused("bench.py", "--log", self.log, "--endpoint", "http://box.invalid", "--system",
                                                "model_triage:openai=m", env={"http_proxy": "http://u:S3cret/x@p:1", "no_proxy": ""}))

    def test_proxy_that_wants_a_password_is_no_result(self):
        error = self.openai_error((407, "text/plain", "who are you"))
        self.assertEqual(type(error).__name__, "Denied")

    def test_early_answer_to_a_large_request_is_read(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)

        def refuse():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 413 X\r\nContent-Length: 9\r\nConnection: close\r\n\r\ntoo large")
            connection.shutdown(socket.SHUT_WR)
            _soon(lambda: not connection.recv(2 ** 20), 2)
            connection.close()
        thread = threading.Thread(target=refuse)
        thread.start()
        self.addCleanup(thread.join)
        system = model_triage.openai("m", endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with self.assertRaisesRegex(model_triage.BadRequest, "too large"):
            system.respond(case(input="x" * 30_000_000), 0)

    def test_text_of_a_cut_or_slow_answer_is_kept(self):
        def half(handler):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it")
            handler.close_connection = True

        def slow(handler):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it")
            time.sleep(1)
        for answer, kind in ((half, "ConnectionCut"), (slow, "ReplyTimeout")):
            error = self.openai_error(answer, timeout_s=0.3)
            self.assertEqual((type(error).__name__, error.text), (kind, "half of it"))

    def test_tls_is_spoken_and_checked_and_part_of_the_calls_time(self):
        listener = socket.create_server(("127.0.0.1", 0))    # takes the connection and never shakes hands
        self.addCleanup(listener.close)
        began = time.monotonic()
        error = self.respond(model_triage.openai("m", endpoint=f"https://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3))
        self.assertEqual(type(error).__name__, "Unavailable")
        self.assertLess(time.monotonic() - began, 2)

    def test_wrong_key_stops_the_run_at_once(self):
        server = self.serve(lambda request: (401, "application/json", '{"error": {"message": "who are you"}}'))
        error = self.refused("bench.py", "--log", self.log, "--endpoint", server.url, "--system", "model_triage:openai=m")
        self.assertIn("who are you; is the right key in BENCH_API_KEY?", error)

    def test_redirect_is_an_error_that_names_its_target_and_takes_no_key_along(self):
        target = self.serve(lambda request: chat())
        server = self.serve(lambda request: (307, "text/plain", "", [("Location", target.url + "/v1/chat/completions")]))
        error = self.respond(model_triage.openai("m", endpoint=server.url))
        self.assertEqual(type(error).__name__, "BadRequest")
        self.assertIn(target.url, str(error))
        self.assertIn(target.url, self.refused("bench.py", "--log", self.log, "--endpoint", server.url,
                                               "--system", "model_triage:openai=m", env={"BENCH_API_KEY": "k"}))
        self.assertEqual(target.requests, [])

    def test_timeout_bounds_the_whole_call(self):
        def silent(handler):
            time.sleep(3)

        def drip_body(handler):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(60):
                handler.wfile.write(b" ")
                time.sleep(0.05)

        def drip_head(handler):
            for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 100:
                handler.wfile.write(bytes([byte]))
                time.sleep(0.05)
        for answer in (silent, drip_body, drip_head):
            with self.subTest(answer.__name__):
                began = time.monotonic()
                error = self.openai_error(answer, timeout_s=0.3)
                self.assertEqual(type(error).__name__, "ReplyTimeout")
                self.assertLess(time.monotonic() - began, 2.5)

    def test_connection_is_kept_open_and_renewed_when_the_server_closed_it(self):
        server = self.serve(lambda request: chat())
        system = model_triage.openai("m", endpoint=server.url)
        accepted = []
        get_request = server.get_request
        server.get_request = lambda: accepted.append(1) or get_request()
        self.addCleanup(lambda: system.close())
        for trial in range(5):
            system.respond(case(), trial)
        self.assertEqual(len(accepted), 1)
        server.answer = lambda request: (*chat(), [("Connection", "close")])
        system.respond(case(), 5)
        system.respond(case(), 6)
        self.assertEqual(len(accepted), 2)

        def then_close(handler):
            handler.reply(*chat())
            handler.close_connection = True
        server.answer = lambda request: then_close
        for trial in range(3):    # the server hangs up after each answer without a word
            system.respond(case(), trial)
            self.assertTrue(_soon(lambda: model_triage._readable(system.http.idle[0].sock)))

    def test_loopback_is_never_asked_through_a_proxy(self):
        proxy = self.serve(lambda request: (502, "text/plain", "from the proxy"))
        server = self.serve_openai(lambda request: chat())
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            self.log.unlink(missing_ok=True)
            self.openai(server, "--trials", 1, env={name: proxy.url, "NO_PROXY": "", "no_proxy": ""})
        self.assertEqual(proxy.requests, [])
        for host, loopback in (("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
                               ("a.localhost", True), ("10.0.0.1", False), ("box", False), ("localhost.", True),
                               ("127.1", True), ("::ffff:127.0.0.1", True), ("0", True)):
            self.assertEqual(model_triage._is_loopback(host), loopback, host)

    def test_other_hosts_follow_the_usual_proxy_variables(self):
        proxy = self.serve_openai(lambda request: chat())
        proxied = self.serve(lambda request: MODELS if request["path"].endswith("/v1/models") else chat())
        for name in ("http_proxy", "ALL_PROXY"):
            self.log.unlink(missing_ok=True)
            self.openai("http://model.invalid:8000", "--trials", 1,
                        env={name: proxied.url.replace("http://", "http://me:word@"), "no_proxy": ""})
        self.assertEqual({request["path"] for request in proxied.requests},
                         {"http://model.invalid:8000/v1/models", "http://model.invalid:8000/v1/chat/completions"})
        self.assertEqual(proxied.requests[0]["headers"]["Proxy-Authorization"], "Basic bWU6d29yZA==")
        self.assertEqual(proxied.requests[0]["headers"]["Host"], "model.invalid:8000")
        self.log.unlink()
        error = self.refused("bench.py", "--log", self.log, "--endpoint", "http://model.invalid:8000", "--system",
                             "model_triage:openai=m", env={"http_proxy": proxy.url, "no_proxy": "model.invalid"})
        self.assertIn("cannot be reached", error)

    def test_https_goes_through_the_proxys_tunnel(self):
        asked = []
        proxy = self.serve(lambda request: chat())
        ModelHandler.do_CONNECT = lambda handler: (asked.append(handler.path), handler.reply(403, "text/plain", "no"))
        self.addCleanup(lambda: delattr(ModelHandler, "do_CONNECT"))
        error = self.refused("bench.py", "--log", self.log, "--endpoint", "https://model.invalid", "--system",
                             "model_triage:openai=m", env={"https_proxy": proxy.url, "no_proxy": ""})
        self.assertEqual(asked, ["model.invalid:443"])
        self.assertIn("cannot be reached", error)

    def test_retry_after_in_seconds_and_as_a_date(self):
        from email.utils import formatdate
        for value, low, high in (("7", 7, 7), ("0", 0, 0), (formatdate(time.time() + 50, usegmt=True), 45, 50),
                                 (formatdate(time.time() - 50, usegmt=True), 0, 0)):
            error = self.openai_error((429, "text/plain", "slow down", [("Retry-After", value)]))
            self.assertTrue(low <= error.retry_after_s <= high, value)
        for value in ("soon", "-5", "", "٣"):
            self.assertIsNone(model_triage.retry_after({"Retry-After": value}))

    def test_rate_limit_is_waited_out_and_not_in_the_latency(self):
        calls = []

        def answer(request):
            calls.append(request["body"]["seed"])
            return (429, "text/plain", "slow down", [("Retry-After", "1")]) if len(calls) == 2 else chat()
        server = self.serve_openai(answer)
        self.openai(server, "--trials", 2, "--cases", self.cases_file(case()))
        rows = self.rows()
        self.assertEqual([row["metadata"].get("waits") for row in rows], [None, 1])
        self.assertGreaterEqual(rows[1]["metadata"]["waited_s"], 0.9)
        self.assertLess(rows[1]["latency_s"], 0.9)

    def test_big_model_that_loads_behind_503_is_waited_for(self):
        answers = iter([(503, "application/json", '{"error": {"message": "Loading model"}}', [("Retry-After", "0")])] * 3)
        server = self.serve(lambda request: next(answers, None) or (MODELS if request["method"] == "GET" else chat()))
        out, _ = self.openai(server, "--trials", 1)
        self.assertIn("ran 9, not run 0", out)
        self.assertNotIn("waits", self.rows()[0]["metadata"])

    def test_server_that_dies_overnight_leaves_trials_unrun_and_a_resume_ends_alike(self):
        served = []

        def answer(request):
            served.append(1)
            if len(served) == 4:
                threading.Thread(target=lambda: (server.shutdown(), server.server_close())).start()
                return (*chat(), [("Connection", "close")])
            return chat()
        server = self.serve_openai(answer)
        out, err = self.openai(server, "--trials", 2, "--patience-s", "0.2", status=1)
        ran = len(self.rows())
        self.assertEqual(out, f"model-triage-m: planned 18, already logged 0, ran {ran}, not run {18 - ran}\n")
        self.assertIn("the same command resumes", err)
        errors = [row["error"]["types"][0] for row in self.rows() if "error" in row]
        self.assertLessEqual(len([kind for kind in errors if kind != "ValueError"]), 1)    # one may have been on its way
        again = self.serve_openai(lambda request: chat())
        self.openai(again, "--trials", 2)
        self.assertEqual(len(self.rows()), 18)


def _soon(true, seconds=5):
    """Wait until true() is, for at most some seconds; return whether it came to be."""
    ends_at = time.monotonic() + seconds
    while not true():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.005)
    return True


class Workers(ServerTest):

    def test_n_workers_keep_n_calls_in_flight_and_never_more(self):
        together = threading.Barrier(3)

        def answer(request):
            together.wait(timeout=10)    # answers only once three are in flight
            return chat()
        server = self.serve_openai(answer)
        cases = self.cases_file(case(), case(id="two"), case(id="three"))
        self.openai(server, "--cases", cases, "--trials", 4, "--workers", 3)
        self.assertEqual(server.most_inside, 3)
        self.assertEqual([body["seed"] for body in server.chats()],    # in trial-major order of starting
                         [1000] * 3 + [1001] * 3 + [1002] * 3 + [1003] * 3)
        self.assertEqual(bench.TrialLog(self.log).header["workers"], 3)
        self.assertEqual(len(self.rows()), 12)

    def test_budget_awaits_and_logs_the_calls_in_flight(self):
        out, _ = self.bench("--workers", 4, "--budget-s", "0.1", system="systems:slow", env={"SLOW_S": "0.3"})
        self.assertEqual(out, f"quick: planned 90, already logged 0, ran {len(self.rows())}, not run {90 - len(self.rows())} "
                              "(stopped by the time budget)\n")
        self.assertGreaterEqual(len(self.rows()), 4)

    def test_outage_with_workers_ends_once_and_logs_nothing_for_it(self):
        server = self.serve_openai(lambda request: chat() if request["body"]["seed"] == 1000 else
                                   (401, "text/plain", "gone"))
        out, err = self.openai(server, "--workers", 4, "--patience-s", "0.1", status=1)
        self.assertEqual(err.count("error:"), 1)
        self.assertEqual({row["trial"] for row in self.rows() if "output" in row}, {0})

    def test_request_delay_paces_requests(self):
        times = []
        server = self.serve_openai(lambda request: times.append(time.monotonic()) or chat())
        self.openai(server, "--trials", 4, "--workers", 4, "--request-delay-s", "0.1", "--cases", self.cases_file(case()))
        self.assertGreaterEqual(times[-1] - times[0], 0.25)


class Progress(ServerTest):

    @unittest.skipUnless(hasattr(os, "openpty"), "needs a pseudo-terminal")
    def run_on_terminal(self, *args):
        """Run on a terminal; return what standard error showed and standard output."""
        terminal, inner = os.openpty()
        self.addCleanup(os.close, terminal)
        process = subprocess.Popen([*PYTHON, str(HERE / "bench.py"), "--system", "systems:slow", "--log", str(self.log),
                                    "--trials", "6", *args], cwd=self.folder, env=ENVIRONMENT | {"SLOW_S": "0.03"},
                                   stdout=subprocess.PIPE, stderr=inner, encoding="utf-8")
        os.close(inner)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:    # the other end was closed
            pass
        out, _ = process.communicate(timeout=20)
        return shown.decode(), out

    def test_line_on_a_terminal_rewrites_itself(self):
        shown, out = self.run_on_terminal()
        self.assertRegex(shown, r"\r\d+ of 54 trials, \d+\.\d\d a second, 0:00:\d\d left, 0 incomplete so far *\r")
        self.assertNotIn("\n", shown)
        self.assertEqual(out, "quick: planned 54, already logged 0, ran 54, not run 0\n")

    def test_quiet_and_no_terminal_show_nothing(self):
        self.assertEqual(self.run_on_terminal("--quiet", "--budget-s", "0.6")[0], "")


class HowSure(BenchTest):

    def test_t_quantile_leaves_five_per_cent_outside(self):
        for df in (1, 2, 3, 4, 8, 19, 60, 61, 99, 500, 5000):
            t = report.t_quantile(df)
            # P(|T| < t) by Simpson's rule over the angle atan(t / sqrt(df)), where the density is a power of a cosine
            scale = 2 * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
            steps, end = 4000, math.atan(t / math.sqrt(df))
            points = [scale * math.cos(end * i / steps) ** (df - 1) for i in range(steps + 1)]
            within = end / steps / 3 * (points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2]))
            density = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi) \
                * (1 + t * t / df) ** (-(df + 1) / 2)
            self.assertLess(abs(within - 0.95) / (2 * density), 1e-6, df)    # as an error of t

    def test_t_quantile_is_that_of_the_tables(self):
        for df, t in ((1, 12.706205), (2, 4.302653), (4, 2.776445), (8, 2.306004), (9, 2.262157), (30, 2.042272),
                      (60, 2.000298), (120, 1.979930), (10 ** 9, 1.959964)):
            self.assertAlmostEqual(report.t_quantile(df), t, delta=1e-6)

    def test_wilson_interval_of_seven_in_ten(self):
        self.assertEqual(report.rounded(report.wilson(0.7, 10)), [0.3968, 0.8922])
        self.assertEqual(report.rounded(report.wilson(0, 10)), [0.0, 0.2775])

    def test_effective_sample_size_is_held_between_the_cases_and_the_trials(self):
        t = report.t_quantile(8)
        self.assertEqual(report.mean_interval(0.5, 0.0, 9, 10), report.wilson(0.5, 90, t))      # all alike
        self.assertEqual(report.mean_interval(1.0, 0.0, 9, 10), report.wilson(1.0, 9, t))
        self.assertEqual(report.mean_interval(0.0, 0.0, 9, 10), report.wilson(0.0, 9, t))
        self.assertEqual(report.mean_interval(0.5, 0.28125, 9, 10), report.wilson(0.5, 9, t))   # always or never
        self.assertEqual(report.mean_interval(0.5, 0.0625, 9, 10), report.wilson(0.5, 36, t))   # in between
        self.assertIsNone(report.mean_interval(0.5, 0.1, 1, 10))

    def test_intervals_are_never_empty_and_stay_within_0_and_1(self):
        for passes in ([0] * 9, [10] * 9, [5] * 9, [10, 0], [1, 2, 3], [0, 10, 5, 7, 10, 10, 0, 0, 1]):
            values, intervals = report.curve(10, passes)
            for k in values:
                for name, value in values[k].items():
                    low, high = intervals[k][name]
                    self.assertTrue(0 <= low <= value + 1e-12 and value <= high + 1e-12 and high <= 1 and low < high,
                                    (passes, k, name))

    def test_interval_for_the_mean_keeps_its_promise(self):
        rng = random.Random(1998)

        def passes_of_ten(p):
            chance, left, passes = (1 - p) ** 10, rng.random(), 0
            while left > chance and passes < 10 and p < 1:
                left -= chance
                passes += 1
                chance *= p * (11 - passes) / (passes * (1 - p))
            return 10 if p == 1 else passes

        def covered(cases, rate, truth, benchmarks=1200):
            hits = 0
            for _ in range(benchmarks):
                rates = [passes_of_ten(rate()) / 10 for _ in range(cases)]
                mean = sum(rates) / cases
                low, high = report.mean_interval(mean, sum((one - mean) ** 2 for one in rates) / (cases - 1), cases, 10)
                hits += low <= truth <= high
            return hits / benchmarks
        kinds = {"beta(0.5, 0.5)": (lambda: rng.betavariate(0.5, 0.5), 0.5), "beta(4, 1)": (lambda: rng.betavariate(4, 1), 0.8),
                 "beta(9, 1)": (lambda: rng.betavariate(9, 1), 0.9), "mixed": (lambda: 1 if rng.random() < 0.9 else 0.3, 0.93),
                 "0.5": (lambda: 0.5, 0.5), "0.9": (lambda: 0.9, 0.9)}
        for cases in (5, 9, 20, 100):
            for name, (rate, truth) in kinds.items():
                with self.subTest(cases=cases, rates=name):
                    share = covered(cases, rate, truth)
                    self.assertGreaterEqual(share, 0.93)
                    if cases == 100:
                        self.assertLessEqual(share, 0.98)
        rare = covered(9, lambda: 0.99 if rng.random() < 0.9 else 0.1, 0.901, benchmarks=4000)
        self.assertLess(rare, 0.8)    # the limit that the docstring and the README name

    def test_spread_of_one_trial_alone(self):
        self.bench(system="model_triage:embedded")
        system = self.report()[0]["systems"][0]
        marks = [counts["marks"] for counts in system["per_case"].values()]
        passed = [sum(mark[trial] == "+" for mark in marks) for trial in range(10)]
        self.assertEqual(system["one_trial"], {"passed_cases": passed, "min": min(passed), "max": max(passed)})

    def test_readme_names_the_limit(self):
        self.assertIn("rare kind of case", (HERE / "README.md").read_text(encoding="utf-8"))


class HowItFails(BenchTest):
    INSIDE = True

    def test_every_outcome_of_the_closed_list(self):
        def result(verdict, check=None, kind=None):
            return {"verdict": verdict, "check": check, "error": kind and {"types": [kind], "message": "m"}}
        for word, given in (
                ("success", result("pass")), ("success", result("pass", kind="ValueError")),
                ("wrong", result("fail", "triage-outcome")), ("wrong", result("fail", "failure-criteria")), ("wrong", result("fail", "BadRequest")),
                ("schema", result("fail", "output-fields")), ("schema", result("incomplete", kind="JSONDecodeError")),
                ("truncated", result("incomplete", kind="TruncatedReply")), ("truncated", result("incomplete", kind="UnfinishedReply")),
                ("empty", result("incomplete", kind="EmptyReply")), ("refusal", result("incomplete", kind="RefusedReply")),
                ("timeout", result("incomplete", kind="ReplyTimeout")), ("server", result("incomplete", kind="ServerError")),
                ("server", result("incomplete", kind="ConnectionCut")), ("server", result("incomplete", kind="MalformedReply")),
                ("server", result("incomplete", kind="BadRequest")), ("rejection", result("fail", "rejection")),
                ("error", result("incomplete", kind="ValueError")), ("error", result("incomplete", kind="UnloggableOutput")),
                ("not-run", result("incomplete", kind="NotRun"))):
            self.assertEqual(report.outcome(given), word, given)

    def test_outcomes_by_case_class_critical_and_over_all(self):
        cases = self.cases_file(case(), case(id="two", **{"class": "delivery"}, critical=True))
        (self.folder / "script.txt").write_text("ok TruncatedReply ok ServerError EmptyReply Odd")
        self.bench("--trials", 3, "--cases", cases, system="systems:scripted")
        system = self.report(self.log, "--cases", cases)[0]["systems"][0]
        self.assertEqual(system["per_case"]["two"]["outcomes"], {"truncated": 1, "server": 1, "error": 1})
        self.assertEqual(system["outcomes"], {
            "all": {"success": 2, "empty": 1, "truncated": 1, "server": 1, "error": 1},
            "by_class": {"billing": {"success": 2, "empty": 1}, "delivery": {"truncated": 1, "server": 1, "error": 1}},
            "critical": {"truncated": 1, "server": 1, "error": 1}})

    def test_failures_are_listed_with_output_or_text_and_reason(self):
        self.bench(system="model_triage:embedded")
        out, _ = self.run_script("report.py", self.log, "--failures", "--out", self.folder / "r.json")
        failed = [row for row in self.rows() if row["case_id"] == "charged-after-closing"]
        self.assertEqual(out.count("charged-after-closing, trial "), len(failed))
        self.assertIn("  charged-after-closing, trial 0 (seed 1000): wrong: category is 'account', expected 'billing'\n"
                      '    {"category": "account", "needs_human": true}\n', out)
        self.assertNotIn("password-changed", out)

    def test_one_case_is_shown_whole(self):
        self.bench(system="model_triage:embedded")
        out, _ = self.run_script("report.py", self.log, "--case", "late-order", "--out", self.folder / "r.json")
        self.assertEqual(len(re.findall(r"(?m)^  late-order, trial \d+ \(seed \d+\): \w+", out)), 10)
        self.assertIn("birthday present", out)
        for case_id in ("nobody", "job-question"):
            self.assertIn(f"no development case '{case_id}'; it has charged-twice, ", self.refused(
                "report.py", self.log, "--case", case_id, "--out", self.folder / "r.json"))

    def test_control_characters_of_a_model_never_reach_the_terminal(self):
        (self.folder / "odd.py").write_text(r"""['\x1b[31mred', {'a': '\x07\x9b1m\u202e'}, '\r\n\x1b]0;title\x07']""")
        cases = self.cases_file(case())
        self.bench("--trials", 3, "--cases", cases, system="systems:odd")
        out, _ = self.run_script("report.py", self.log, "--cases", cases, "--failures", "--out", self.folder / "r.json")
        self.assertFalse(re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out))
        self.assertIn("red", out)

    def test_grid_is_aligned_whatever_language_the_rest_is_in(self):
        cases = self.cases_file(case(**{"class": "\u4e2d\u6587"}), case(id="a", input="\u4e2d"), case(id="a-longer-one"))
        self.bench("--trials", 1000, "--cases", cases)
        _, out = self.report(self.log, "--cases", cases)
        rows = [line for line in out.splitlines() if re.match(r"  (one|a|a-longer-one) +1000/1000 ", line)]
        head, = [line for line in out.splitlines() if "trials (+" in line]
        self.assertEqual([line.index("+") for line in rows], [head.index("trials (")] * 3)

    @unittest.skipUnless(hasattr(os, "openpty"), "needs a pseudo-terminal")
    def test_colours_only_on_a_terminal_and_not_with_no_color(self):
        self.bench(system="model_triage:embedded")
        for env, colored in ((ENVIRONMENT, True), (ENVIRONMENT | {"NO_COLOR": "1"}, False)):
            terminal, inner = os.openpty()
            process = subprocess.Popen([*PYTHON, str(HERE / "report.py"), str(self.log), "--out", str(self.folder / "r.json")],
                                       stdout=inner, cwd=self.folder, env=env)
            os.close(inner)
            shown = b""
            try:
                while part := os.read(terminal, 4096):
                    shown += part
            except OSError:
                pass
            process.wait(timeout=20)
            os.close(terminal)
            self.assertEqual(b"\x1b[32m" in shown, colored)
        self.assertNotIn("\x1b", self.report()[1])

    def test_control_characters_never_reach_a_terminal_with_colours_either(self):
        block = "\n".join(report.block(self.evil_system(), color=True))
        self.assertIn("\x1b[32m++\x1b[0m", block)
        self.assertFalse(re.search(r"\x1b(?!\[\d+m)|\x1b\[31mEVIL|[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f]", block))

    def evil_system(self):
        (self.folder / "evil.py").write_text(SYSTEMS + r"""
Quick.name, Quick.model = "\x1b[31mEVIL", "\x1b]0;EVIL\x07"
quick.respond = lambda case, trial: harness.Answer(case["expected"], {"model": f"\x1b[31mEVIL\x1b]0;{trial}\x07"})
""")
        self.bench("--trials", 2, "--cases", self.cases_file(case(**{"class": "\x1b[31mEVIL"})), system="evil:quick")
        return self.report(self.log, "--cases", self.folder / "cases.json")[0]["systems"][0]


class AreTheseDraws(BenchTest):
    INSIDE = True

    def test_equal_outputs_at_a_temperature_are_pointed_out(self):
        cases = self.cases_file(case(), case(id="two"))
        self.bench("--trials", 3, "--cases", cases)
        written, out = self.report(self.log, "--cases", cases)
        self.assertEqual(written["systems"][0]["per_case"]["one"]["distinct_outputs"], 1)
        self.assertIn("the server may ignore the seed or the temperature, or answer from a cache", out)

    def test_one_output_among_errors_is_no_sign_of_a_cache(self):
        (self.folder / "script.txt").write_text("ok Odd Odd Odd")
        cases = self.cases_file(case())
        self.bench("--trials", 4, "--cases", cases, system="systems:scripted")
        self.assertNotIn("cache", self.report(self.log, "--cases", cases)[1])

    def test_different_outputs_are_counted_and_not_pointed_out(self):
        (self.folder / "odd.py").write_text("[1, {'a': 1, 'b': 2}, {'b': 2, 'a': 1}, 1.5]")
        cases = self.cases_file(case())
        self.bench("--trials", 4, "--cases", cases, system="systems:odd")
        written, out = self.report(self.log, "--cases", cases)
        self.assertEqual(written["systems"][0]["per_case"]["one"]["distinct_outputs"], 3)
        self.assertNotIn("cache", out)


class HowFastAndHowMuch(BenchTest):

    def usage(self, *metadata, prices=(None, None), passed=()):
        usage = report.Usage()
        for number, one in enumerate(metadata):
            usage.add(one, number in passed)
        return usage.summary(10, *prices)

    def test_counts_that_a_server_did_not_give_are_missing_and_never_zero(self):
        nothing = {"tokens_in": None, "tokens_out": None, "tokens_per_s": None, "trials_counted": {"in": 0, "out": 0},
                   "trials_counted_both": 0}
        self.assertEqual(self.usage({}, {"seed": 1}), nothing)
        self.assertEqual(self.usage({"tokens_in": -5, "tokens_out": 10 ** 400}, {"tokens_in": True, "generation_s": 1e-310}),
                         nothing)
        found = self.usage({"tokens_in": 10, "tokens_out": 4, "generation_s": 2.0}, {"tokens_out": 6}, {})
        self.assertEqual(found, {"tokens_in": 10, "tokens_out": 10, "tokens_per_s": 2.0, "trials_counted": {"in": 1, "out": 2},
                                 "trials_counted_both": 1})

    def test_cost_of_a_trial_a_case_and_a_passed_trial(self):
        counted = [{"tokens_in": 1000, "tokens_out": 100}] * 4
        found = self.usage(*counted, {"tokens_in": 9}, {"tokens_out": 9}, {}, prices=(2.0, 10.0), passed=(0, 1, 4, 6))
        self.assertEqual(found["cost"], {"per_trial": 0.003, "per_case": 0.03, "per_passed_trial": 0.006})
        self.assertIsNone(self.usage({"tokens_in": 9}, {"tokens_out": 9}, prices=(1.0, 1.0))["cost"])

    def test_prices_and_latencies_in_the_report(self):
        written, out = self.report(HERE / "recorded" / "smollm2.jsonl", "--price-in", "1", "--price-out", "2")
        system = written["systems"][0]
        rows = [json.loads(line) for line in (HERE / "recorded" / "smollm2.jsonl").read_bytes().splitlines()]
        rows = [row for row in rows if "output" in row]
        latencies = sorted(row["latency_s"] for row in rows)
        self.assertEqual(system["latency_s"], {"trials": 70, "median": latencies[34], "p90": latencies[62], "p95": latencies[66]})
        tokens = [sum(row["metadata"][key] for row in rows) for key in ("tokens_in", "tokens_out")]
        self.assertEqual([system["usage"]["tokens_in"], system["usage"]["tokens_out"]], tokens)
        self.assertAlmostEqual(system["usage"]["cost"]["per_trial"], (tokens[0] + 2 * tokens[1]) / 1e6 / 70)
        self.assertIn("with 70 latencies, their p95 is close to their maximum", out)
        self.assertTrue(30 < system["wall_s"] < 60)


class IsBBetterThanA(BenchTest):
    INSIDE = True

    def test_p_value_over_trials_equals_a_count_over_every_split(self):
        for passes, n_a, n_b in (([(3, 0), (2, 1)], 3, 3), ([(0, 2), (1, 2), (3, 3)], 3, 3), ([(1, 2)], 2, 4), ([(0, 3), (2, 2)], 2, 3)):
            observed = sum(b for _, b in passes)
            totals = [0]
            for a, b in passes:
                trials = [1] * (a + b) + [0] * (n_a + n_b - a - b)
                totals = [total + sum(split) for total in totals for split in itertools.combinations(trials, n_b)]
            mean = Fraction(sum(totals), len(totals))
            p = sum(abs(total - mean) >= abs(observed - mean) for total in totals) / len(totals)
            self.assertAlmostEqual(report.trial_p_value(passes, n_a, n_b)["p"], p, 12)

    def test_p_value_over_trials_by_normal_approximation_is_close_and_says_so(self):
        passes = [(150 + case, 160 + case) for case in range(60)]
        exact = report.trial_p_value(passes[:20], 400, 400)
        self.assertTrue(exact["method"].startswith("exact"))
        before, report.MOST_EXACT_STEPS = report.MOST_EXACT_STEPS, 0
        self.addCleanup(setattr, report, "MOST_EXACT_STEPS", before)
        approximate = report.trial_p_value(passes[:20], 400, 400)
        self.assertTrue(approximate["method"].startswith("normal approximation"))
        self.assertAlmostEqual(exact["p"], approximate["p"], 3)

    def test_sign_flip_p_value_equals_a_count_over_every_pattern(self):
        differences = [3, -1, 0, 2, 2, -5, 0, 1]
        nonzero = [one for one in differences if one]
        totals = [abs(sum(s * one for s, one in zip(signs, nonzero))) for signs in itertools.product((1, -1), repeat=len(nonzero))]
        self.assertEqual(report.sign_flip_p_value(differences)["p"], sum(t >= abs(sum(differences)) for t in totals) / len(totals))
        self.assertEqual(report.sign_flip_p_value([0, 0])["p"], 1.0)

    def test_sign_flip_p_value_above_sixteen_cases_is_sampled_and_repeatable(self):
        found = report.sign_flip_p_value([1] * 12 + [-1] * 8)
        self.assertEqual(found, report.sign_flip_p_value([1] * 12 + [-1] * 8))
        self.assertIn("9999 drawn patterns", found["method"])
        self.assertAlmostEqual(found["p"], 0.5034, delta=0.02)    # P(|heads - 10| >= 2) of 20

    def two(self, a="ok", b="ok", args_a=(), args_b=(), cases=(case(), case(id="two"))):
        path = self.cases_file(*cases)
        for name, script, args in (("a", a, args_a), ("b", b, args_b)):
            (self.folder / "script.txt").write_text(script)
            self.run_script("bench.py", "--system", "systems:scripted", "--log", self.folder / f"{name}.jsonl", "--cases", path,
                            *(args or ("--trials", 4)))
        return self.report(self.folder / "a.jsonl", self.folder / "b.jsonl", "--cases", path)

    def test_pair_is_compared_on_both_questions(self):
        written, out = self.two(a="Odd Odd Odd Odd Odd Odd Odd Odd", b="ok")
        compared, = written["comparisons"]
        self.assertEqual((compared["difference"], compared["better"], compared["worse"], compared["equal"]), (1.0, 2, 0, 0))
        self.assertAlmostEqual(compared["on_these_cases"]["p"], 2 / 70 ** 2)
        self.assertEqual(compared["on_cases_like_these"]["p"], 0.5)
        self.assertIsNone(compared["on_cases_like_these"]["interval_95"])    # no spread between cases to judge by
        self.assertIn("is b better than a on exactly these cases? p = 0.000408", out)
        self.assertIn("would b be better than a on other cases of this kind? p = 0.5", out)

    def test_different_trial_counts_and_sampling_are_said(self):
        written, _ = self.two(args_b=("--trials", 3))
        self.assertEqual(written["comparisons"][0]["notes"], ["trials per case differ: 4 and 3"])
        self.run_script("bench.py", "--system", "systems:other", "--log", self.folder / "c.jsonl", "--cases",
                        self.folder / "cases.json", "--trials", 4)
        written, out = self.report(self.folder / "a.jsonl", self.folder / "c.jsonl", "--cases", self.folder / "cases.json")
        self.assertIn("sampling differs: sampling.temperature (1.0 in a, 0.5 in b)", out)

    def test_trials_that_were_not_run_and_other_tasks_are_not_compared(self):
        written, out = self.two(args_b=("--budget-s", 0))
        self.assertIn("20 planned trials were not run", written["comparisons"][0]["refused"])
        self.assertIn("not compared", out)
        a = written["systems"][0]
        self.assertIn("different tasks", report.compare(a, a | {"task": {"sha256": "x"}})["refused"])

    def test_other_case_set_is_refused(self):
        self.two()
        self.bench("--trials", 2)
        self.assertIn("another case set", self.refused("report.py", self.folder / "a.jsonl", self.log, "--out", "r.json",
                                                       "--cases", self.folder / "cases.json"))


class CanIShip(BenchTest):
    INSIDE = True

    def setUp(self):
        super().setUp()
        self.cases = self.cases_file(case(), case(id="two", **{"class": "delivery"}), case(id="three"))
        (self.folder / "script.txt").write_text(" ".join(["ok ok ok"] * 9 + ["ok Odd ok"]))
        self.bench("--trials", 10, "--cases", self.cases, system="systems:scripted")

    def decided(self, *args, status, log=None):
        self.inside(report, log or self.log, "--cases", self.cases, "--out", self.folder / "report.json", *args, status=status)
        return json.loads((self.folder / "report.json").read_text())["decisions"]

    def test_rules_that_are_met_exit_0_and_others_exit_3(self):
        for rule, value, met in (("pass^3>=0.8", 0.9, True), ("pass^3>=0.95", 0.9, False), ("pass@1 > 0.96", 0.9667, True),
                                 ("pass@1[delivery]>=0.95", 0.9, False), ("pass@1[billing]>=1", 1.0, True),
                                 ("incomplete<=1", 1, True), ("incomplete<1", 1, False), ("not_run==0", 0, True),
                                 ("flaky<=0", 1, False), ("flaky[billing]<=0", 0, True), ("p95_s<5", None, True)):
            with self.subTest(rule):
                decision, = self.decided("--require", rule, status=0 if met else 3)
                self.assertEqual((decision["rule"], decision["met"]), (rule, met))
                if value is not None:
                    self.assertAlmostEqual(decision["value"], value, 4)
                if not met:
                    self.assertEqual(decision["cases"], ["two"])

    def test_rule_is_met_at_its_very_bound(self):
        for passed in range(11):
            marks = "+" * passed + "x" * (10 - passed)
            system = {"system": {"name": "s"}, "source": "f", "trials_per_case": 10, "per_case": {
                f"c{number}": {"class": "c"} | report.counts_of(marks) for number in range(7)}}
            for metric in ("pass@1", "pass^1"):
                for sign, met in ((">=", True), ("<=", True), ("==", True), (">", False), ("<", False)):
                    wanted = report.rule(f"{metric}{sign}{passed / 10}")
                    self.assertEqual(report.decide(wanted, system, False)["met"], met, wanted)

    def test_every_rule_must_be_met(self):
        self.assertEqual([one["met"] for one in self.decided("--require", "flaky<=1", "--require", "flaky<=0", status=3)],
                         [True, False])

    def test_lower_bound_tests_the_intervals_lower_end(self):
        self.run_script("report.py", self.log, "--cases", self.cases, "--out", self.folder / "report.json", "--require",
                        "pass@1>=0.9", "--lower-bound", status=3)
        decision, = self.decided("--require", "pass@1>=0.9", "--lower-bound", status=3)
        low = json.loads((self.folder / "report.json").read_text())["systems"][0]["curve_interval_95"]["1"]["pass_at_k"][0]
        self.assertAlmostEqual(decision["value"], low, 4)
        self.inside(report, self.log, "--require", "pass@1<=0.9", "--lower-bound", status=2)
        self.assertIn("single case", self.decided("--require", "pass@1[delivery]>=0", "--lower-bound", status=3)[0]["why"])

    def test_slow_cases_are_behind_a_latency_rule_that_is_not_met(self):
        (self.folder / "napping.py").write_text(SYSTEMS + """
def respond(case, trial):
    time.sleep(0.05 if case["id"] == "three" else 0)
    return harness.Answer(case["expected"], {})
quick.respond = respond
""")
        self.log.unlink()
        self.bench("--trials", 2, "--cases", self.cases, system="napping:quick")
        decision, = self.decided("--require", "p95_s<0.05", status=3)
        self.assertEqual(decision["cases"], ["three"])

    def test_what_cannot_be_computed_is_not_met(self):
        for rule, why in (("pass@11>=0", "11 trials"), ("pass@1[nothing]>=0", "no case of the class")):
            self.assertIn(why, self.decided("--require", rule, status=3)[0]["why"])
        self.log.unlink()
        self.bench("--trials", 10, "--budget-s", 0, "--cases", self.cases, system="systems:scripted")
        decision, = self.decided("--require", "pass@1>=0", status=3)
        self.assertEqual((decision["value"], decision["met"]), (None, False))
        self.assertIn("30 planned trials were not run", decision["why"])
        for rule in ("flaky<=0", "p95_s<5"):
            self.assertIn("30 planned trials were not run", self.decided("--require", rule, status=3)[0]["why"])

    def test_decisions_are_made_on_what_was_measured_and_not_on_what_is_shown(self):
        self.log.unlink()
        cases = self.cases = self.cases_file(*[case(id=f"c{number}") for number in range(3)])
        (self.folder / "script.txt").write_text("Odd ok")
        self.bench("--trials", 10, "--cases", cases, system="systems:scripted")
        self.assertEqual(self.decided("--require", "pass@1[billing]>=0.9666666666666", status=0)[0]["met"], True)
        for rule, met in (("pass@1>=0.9667", False), ("pass@1>=0.96666", True), ("pass@1==0.9667", False)):
            self.assertEqual(self.decided("--require", rule, status=0 if met else 3)[0]["met"], met, rule)

    def test_rules_that_make_no_sense_are_bad_usage(self):
        for text in ("pass@0>=1", "pass^3>=20", "pass@1\u0663>=0", "pass>=1", "pass@1", "pass@1>=x", "speed>1", "p95_s[billing]<1"):
            _, err = self.inside(report, self.log, "--require", text, status=2)
            self.assertIn("usage:", err)

    def test_baseline_fails_when_five_of_nine_cases_fell_from_always_to_never(self):
        nine = [case(id=f"c{number}") for number in range(9)]
        self.cases = self.cases_file(*nine, name="nine.json")
        for name, script in (("old", "ok"), ("same", "ok"), ("new", " ".join(["Odd"] * 5 + ["ok"] * 4) + " "),
                             ("slip", " ".join(["Odd"] + ["ok"] * 89))):
            (self.folder / "script.txt").write_text(script * 10 if name == "new" else script)
            self.run_script("bench.py", "--system", "systems:scripted", "--log", self.folder / f"{name}.jsonl", "--cases", self.cases)
        self.decided(status=0, log=self.folder / "old.jsonl")
        baseline = self.folder / "baseline.json"
        (self.folder / "report.json").rename(baseline)
        decision, = self.decided("--baseline", baseline, status=3, log=self.folder / "new.jsonl")
        self.assertAlmostEqual(decision["p"] / 9.29046e-27, 1, 5)
        self.assertEqual(decision["cases"], [f"c{number}" for number in range(5)])
        older = json.loads(baseline.read_text())["systems"][0]
        slightly = {case_id: counts | report.counts_of("+" * 9999 + "x") for case_id, counts in older["per_case"].items()}
        always = {case_id: counts | report.counts_of("+" * 10000) for case_id, counts in older["per_case"].items()}
        long = [older | {"trials_per_case": 10000, "per_case": per_case} for per_case in (always, slightly)]
        data = json.loads(baseline.read_text()) | {"systems": [long[0]]}
        decision = report.against_baseline(long[1], data, "b.json")    # a drop that four places do not show
        self.assertEqual((round(decision["value"], 3), decision["p"] < 0.05, decision["met"]), (0, True, False))
        for name in ("same", "slip"):    # no drop, and one that is a matter of chance
            self.assertTrue(self.decided("--baseline", baseline, status=0, log=self.folder / f"{name}.jsonl")[0]["met"])

    def test_baseline_of_another_case_set_or_system_or_no_report_is_refused(self):
        self.decided(status=0)
        baseline = self.folder / "baseline.json"
        (self.folder / "report.json").rename(baseline)
        other = self.folder / "other.jsonl"
        self.run_script("bench.py", "--system", "systems:factory=x", "--log", other, "--cases", self.cases)
        args = ["--cases", self.cases, "--out", "r.json", "--baseline"]
        self.assertIn("no system made-x", self.refused("report.py", other, *args, baseline))
        self.assertIn("not a report", self.refused("report.py", self.log, *args, self.cases))
        for change in ({"trials_per_case": 0}, {"trials_per_case": 3}, {"per_case": 5}):
            data = json.loads(baseline.read_text())
            data["systems"][0].update(change)
            (self.folder / "bad.json").write_text(json.dumps(data))
            self.assertIn("not a report", self.refused("report.py", self.log, *args, self.folder / "bad.json"))
        self.log.unlink()
        self.bench("--trials", 1)
        self.assertIn("another case set", self.refused("report.py", self.log, "--out", "r.json", "--baseline", baseline))


EVIL = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "| a | b |\n|---|---|", "`code` ``` *b* _i_ [l](http://x) # h",
        "\u2028\u202e\x1b[31m\x00 \ud800", "&lt; &#60; <!-- --> ]]>", "http://evil.example @someone #1", "'\"><svg onload=x>"]


class Pages(BenchTest):
    """The report to paste and the report to look at."""
    INSIDE = True

    def evil_log(self):
        (self.folder / "odd.py").write_text(ascii(EVIL))
        cases = self.cases_file(case(**{"class": "<b>|class*"}), case(id="two"))
        self.bench("--trials", len(EVIL), "--cases", cases, system="systems:odd")
        self.run_script("report.py", self.log, "--cases", cases, "--out", self.folder / "report.json",
                        "--html", self.folder / "page.html", "--markdown", self.folder / "page.md")
        return json.loads((self.folder / "report.json").read_text())["systems"][0]

    def parsed(self, path):
        """Return (tags with their attributes, text of the page's body, text of its scripts) of an HTML file."""
        tags, text, scripts, inside = [], [], [], []

        class Parser(html.parser.HTMLParser):
            def handle_starttag(self, tag, attrs):
                tags.append((tag, dict(attrs)))
                inside.append(tag)

            def handle_endtag(self, tag):
                while inside and inside.pop() != tag:
                    pass

            def handle_data(self, data):
                (scripts if "script" in inside else text if "style" not in inside else []).append(data)
        Parser().feed(path.read_text(encoding="utf-8"))
        return tags, "".join(text), scripts

    def test_markup_in_outputs_changes_nothing_on_the_page(self):
        self.evil_log()
        tags, text, scripts = self.parsed(self.folder / "page.html")
        self.assertEqual([tag for tag, _ in tags].count("script"), 2)
        self.assertFalse({"img", "b>", "iframe", "link", "object"} & {tag for tag, _ in tags})
        self.assertFalse([attrs for _, attrs in tags if any(name.startswith("on") for name in attrs)])
        self.assertIn("<img src=x onerror=alert(1)>", text)
        self.assertIn("<b>|class*", text)
        details = json.loads(scripts[0])
        self.assertEqual(len(details), 2 * len(EVIL))
        self.assertTrue(any("</script><script>alert(1)</script>" in one for one in details))

    def test_page_needs_nothing_from_elsewhere(self):
        self.evil_log()
        tags, _, _ = self.parsed(self.folder / "page.html")
        self.assertFalse([(tag, attrs) for tag, attrs in tags if {"src", "href", "srcset", "action"} & set(attrs)])
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        self.assertNotIn("@import", page)
        self.assertNotIn("url(", page)

    def test_grid_comes_first_with_a_cell_that_the_keyboard_reaches_for_each_trial(self):
        tags, text, scripts = self.parsed(HERE / "runs" / "recorded" / "report.html")
        cells = [attrs for tag, attrs in tags if tag == "button"]
        written = json.loads((HERE / "runs" / "recorded" / "report.json").read_text())
        self.assertEqual(len(cells), 90 * len(written["systems"]))
        self.assertEqual(sorted(int(attrs["data-cell"]) for attrs in cells), list(range(len(cells))))
        kinds = {"+": "pass", "x": "fail", "!": "incomplete", ".": "not-run"}
        marks = "".join(counts["marks"] for system in written["systems"] for counts in system["per_case"].values())
        self.assertEqual([attrs["class"] for attrs in cells], [kinds[mark] for mark in marks])
        order = [tag for tag, _ in tags]
        self.assertLess(order.index("button"), order.index("svg"))
        details = json.loads(scripts[0])
        self.assertTrue(details[0].startswith("charged-twice, trial 0 (seed 1000): success"))

    def test_figures_on_the_page_are_those_of_the_report(self):
        _, text, _ = self.parsed(HERE / "runs" / "recorded" / "report.html")
        page = (HERE / "runs" / "recorded" / "report.html").read_text()
        for system in json.loads((HERE / "runs" / "recorded" / "report.json").read_text())["systems"]:
            verdicts = system["verdicts"]
            self.assertIn(f"{verdicts['pass']} pass, {verdicts['fail']} fail, {verdicts['incomplete']} incomplete", text)
            for value in (system["recording_sha256"], system["run_id"], system["system"]["prompt"]["sha256"],
                          system["task"]["sha256"], system["sessions"][0]["environment"]["platform"]):
                self.assertIn(value, text)
            for counts in system["per_case"].values():
                self.assertIn("{:.2f} to {:.2f}".format(*counts["interval_95"]), text)
            if system["curve"]:
                points = " ".join(f"{40 + 480 * (k - 1) / 9:.1f},{190 - 170 * system['curve'][str(k)]['pass_at_k']:.1f}"
                                  for k in range(1, 11))
                self.assertIn(f'<polyline class=at points="{points}"', page)

    def test_markdown_shows_outputs_as_they_are(self):
        self.evil_log()
        text = (self.folder / "page.md").read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith("|"):
                cells = re.sub(r"(?<!`)(`+) .*? \1(?!`)", "", line)    # without its code spans, as Markdown finds them
                self.assertNotIn("<", cells)
                self.assertIn(cells.count("|"), (6, 7))    # tables of five and of six columns, whatever the cells hold
                self.assertNotRegex(re.sub(r"\\\|", "", line).replace(" | ", ""), r"[^ |]\|[^ |]")
        self.assertIn('` "<img src=x onerror=alert(1)>" `', text)
        outside = re.sub(r"(?<!`)(`+) .*? \1(?!`)", "", text)
        self.assertNotRegex(re.sub(r"&#\d+;|pass@k", "", outside), r"[`*_\[\]@]|https?:|www")

    def test_above_20000_cells_a_bar_stands_in_for_a_cases_marks(self):
        before, report.MOST_CELLS = report.MOST_CELLS, 8
        self.addCleanup(setattr, report, "MOST_CELLS", before)
        self.assertEqual(before, 20000)
        cases = self.cases_file(case())
        self.bench("--trials", 9, "--cases", cases)
        self.report(self.log, "--cases", cases, "--html", self.folder / "page.html")
        tags, text, _ = self.parsed(self.folder / "page.html")
        self.assertNotIn("button", [tag for tag, _ in tags])
        self.assertEqual([attrs["style"] for tag, attrs in tags if tag == "span"], ["width:100.000%"])
        self.assertIn("more than 8 trials, so a bar for each case", text)


class CorrectedAnswers(BenchTest):
    INSIDE = True

    def test_regrade_accepts_the_same_inputs_with_other_answers_and_says_so_everywhere(self):
        old = self.cases_file(case(), case(id="two"), name="old.json")
        self.bench("--trials", 2, "--cases", old)
        new = self.cases_file(case(), case(id="two", expected={"category": "billing", "needs_human": False}), name="new.json")
        error = self.refused("report.py", self.log, "--cases", new, "--out", "r.json")
        self.assertIn("--regrade", error)
        self.assertIn("old.json", error)
        self.assertIn("--regrade", self.refused("bench.py", "--log", self.log, "--cases", new, "--convert", "r.json"))
        written, out = self.report(self.log, "--cases", new, "--regrade", "--html", self.folder / "p.html",
                                   "--markdown", self.folder / "p.md")
        system = written["systems"][0]
        self.assertEqual(system["verdicts"], {"pass": 2, "fail": 2, "incomplete": 0})
        self.assertEqual(system["regraded_from"], bench.TrialLog(self.log).header["case_set_sha256"])
        out2, _ = self.run_script("bench.py", "--log", self.log, "--cases", new, "--convert", self.folder / "r.json", "--regrade")
        out3, _ = self.run_script("harness.py", "run", "--cases", new, "--recording", self.folder / "r.json", "--out", self.folder / "o.json")
        again, out4 = self.report(self.folder / "o.json", "--cases", new)
        for text in (out, out4, (self.folder / "p.html").read_text(), html.unescape((self.folder / "p.md").read_text())):
            self.assertIn("graded anew with today", text)
        self.run_script("bench.py", "--log", self.log, "--cases", old, "--convert", self.folder / "r.json")
        self.assertIn("--regrade when its log is converted", self.refused(
            "harness.py", "run", "--cases", new, "--recording", self.folder / "r.json", "--out", "o.json"))
        self.assertIn("report.py --regrade", self.refused("bench.py", "--system", "systems:quick", "--log", self.log, "--cases", new,
                                                          "--trials", 2))
        for text in (out2, out3):
            self.assertIn("other answers than it was made with", text)
        self.assertEqual(again["systems"][0]["regraded_from"], system["regraded_from"])

    def test_task_that_has_changed_since_is_said(self):
        (self.folder / "mine.py").write_text((HERE / "triage_task.py").read_text())
        self.bench("--trials", 1, "--task", "mine")
        self.assertNotIn("has changed", self.report(self.log, "--task", "mine")[1])
        (self.folder / "mine.py").write_text((HERE / "triage_task.py").read_text() + "# corrected\n")
        self.assertIn("the task has changed since this log was made (with mine)", self.report(self.log, "--task", "mine")[1])

    def test_other_inputs_are_refused_with_regrade_too(self):
        self.bench("--trials", 1, "--cases", self.cases_file(case(), name="old.json"))
        new = self.cases_file(case(input="Hello!"), name="new.json")
        error = self.refused("report.py", self.log, "--cases", new, "--regrade", "--out", "r.json")
        self.assertNotIn("--regrade", error)


class Recorded(BenchTest):
    """What is committed is what the tool makes of the recorded logs."""

    LOGS = ("smollm2", "smollm2-stopped", "gemma3-270m")

    def test_recorded_runs_and_report_match_fresh_runs(self):
        for name in self.LOGS:
            recording, record = self.folder / f"{name}.recording.json", self.folder / f"{name}.run.json"
            self.run_script("bench.py", "--log", HERE / "recorded" / f"{name}.jsonl", "--convert", recording)
            self.run_script("harness.py", "run", "--recording", recording, "--out", record)
            self.assertEqual(recording.read_text(), (HERE / "runs" / "recorded" / recording.name).read_text())
            fresh, saved = (json.loads((folder / record.name).read_text()) for folder in (self.folder, HERE / "runs" / "recorded"))
            for one in (fresh, saved):
                for field in harness.RUN_DESCRIPTION_FIELDS:
                    del one["manifest"][field]
            self.assertEqual(fresh, saved)
        written, _ = self.report(*(HERE / "recorded" / f"{name}.jsonl" for name in self.LOGS),
                                 "--html", self.folder / "report.html", "--markdown", self.folder / "report.md")
        self.assertEqual(written, json.loads((HERE / "runs" / "recorded" / "report.json").read_text()))
        for name in ("report.html", "report.md"):
            self.assertTrue((self.folder / name).read_text() == (HERE / "runs" / "recorded" / name).read_text(), name)

    def test_stopped_log_is_the_beginning_of_the_whole_one(self):
        whole, stopped = ((HERE / "recorded" / f"{name}.jsonl").read_bytes() for name in ("smollm2", "smollm2-stopped"))
        self.assertTrue(whole.startswith(stopped) and len(stopped) < len(whole))
        self.assertIn(b'{"resumed_at":', whole[len(stopped):].splitlines()[0])

    def test_digests_of_the_recordings_are_those_of_the_logs(self):
        recordings = json.loads((HERE / "recorded" / "recordings.json").read_text())
        for name, held in recordings.items():
            out, _ = self.run_script("outputs_digest.py", HERE / "recorded" / f"{name}.jsonl")
            self.assertEqual(out.split()[:2], [held["recordings"][0]["digest"], str(held["recordings"][0]["trials"])])
            self.assertEqual(len(held["recordings"]), 3)
            self.assertEqual(held["equal"], len({one["digest"] for one in held["recordings"]}) == 1)


class Shards(BenchTest):
    """A plan spread over logs is the plan, once they are put together."""
    INSIDE = True

    def shard(self, number, of=3, *args, trials=8, system="systems:journal=m", **kwargs):
        """Run a shard into its default log; return the log's path."""
        self.run_script("bench.py", "--system", system, "--log-dir", self.folder, "--trials", trials,
                        "--shard", f"{number}/{of}", *args, **kwargs)
        return self.folder / f"{system.rpartition('=')[2] if '=' in system else 'quick'}.shard-{number}-of-{of}.jsonl"

    def read(self, path):
        header, *lines = map(json.loads, path.read_text().splitlines())
        return header, [line for line in lines if "case_id" in line]

    def test_shard_runs_every_case_of_its_trial_numbers_into_a_log_of_its_own(self):
        self.bench("--trials", 8, system="systems:journal=m")
        whole, _ = self.read(self.log)
        for number, trials in ((1, [0, 3, 6]), (2, [1, 4, 7]), (3, [2, 5])):
            header, rows = self.read(self.shard(number))
            self.assertEqual([(row["trial"], row["case_id"]) for row in rows],
                             [(trial, case_id) for trial in trials for case_id in DEVELOPMENT])
            self.assertEqual(header["shard"], f"{number}/3")
            self.assertEqual({key: header[key] for key in bench.COMPARED} | {"shard": None},
                             {key: whole[key] for key in bench.COMPARED})

    def test_shards_together_report_what_the_whole_plan_does(self):
        self.bench("--trials", 8, system="systems:journal=m")
        shards = [self.shard(number) for number in (3, 1, 2)]
        one, other = self.report(self.log, *shards)[0]["systems"]
        self.assertEqual(other["source"], "m.shard-3-of-3.jsonl and 2 more")
        self.assertEqual(len(other["sessions"]), 3)
        for key in ("system", "trials_per_case", "cases", "verdicts", "not_run", "failures_by_check", "outcomes", "flaky_cases",
                    "never_passed", "curve", "curve_interval_95", "one_trial", "named_in_replies"):
            self.assertEqual(one[key], other[key], key)
        self.assertEqual([counts["marks"] for counts in one["per_case"].values()],
                         [counts["marks"] for counts in other["per_case"].values()])

    def test_recording_of_shards_has_the_digest_that_the_report_of_their_logs_has(self):
        shards = [self.shard(number) for number in (2, 1, 3)]
        out, _ = self.run_script("bench.py", "--system", "systems:journal=m", "--log-dir", self.folder, "--convert", self.folder / "r.json")
        self.assertIn("72 trials, 0 of them not run, from 3 logs of shards", out)
        self.run_script("bench.py", "--convert", self.folder / "r2.json", *(word for path in shards for word in ("--log", path)))
        self.assertEqual((self.folder / "r.json").read_bytes(), (self.folder / "r2.json").read_bytes())
        self.run_script("harness.py", "run", "--recording", self.folder / "r.json", "--out", self.folder / "run.json")
        one, other = self.report(*shards, self.folder / "run.json")[0]["systems"]
        self.assertEqual(one | {"source": ""}, other | {"source": ""})
        headers = [self.read(path)[0] for path in sorted(shards)]
        self.assertEqual([(session["shard"], session["run_id"]) for session in one["sessions"]],
                         [(header["shard"], header["run_id"]) for header in headers])

    def test_what_is_in_no_shard_was_not_run(self):
        system, = self.report(self.shard(1), self.shard(3))[0]["systems"]
        self.assertEqual((system["not_run"], system["curve"], system["wall_s"]), (27, None, None))
        self.assertEqual(system["per_case"]["late-order"]["marks"][1::3], "...")
        self.assertIn("(27 of them not run)", self.report(self.folder / "m.shard-1-of-3.jsonl", self.folder / "m.shard-3-of-3.jsonl",
                                                        "--failures")[1] + self.report(*self.folder.glob("m.shard-[13]*"))[1])

    def test_trial_in_two_logs_is_refused(self):
        one, two = self.shard(1), self.shard(2)
        copy = self.folder / "copy.jsonl"
        shutil.copy(two, copy)
        for inputs in ([one, two, copy], [one, one]):
            for script, args in (("report.py", [*inputs, "--out", self.folder / "r.json"]),
                                 ("bench.py", [*(word for path in inputs for word in ("--log", path)), "--convert", self.folder / "r.json"])):
                self.assertRegex(self.refused(script, *args), r"line 2: case charged-twice, trial [01] is in the logs twice")
        self.assertFalse((self.folder / "r.json").exists())

    def test_shards_of_different_plans_are_refused(self):
        one = self.shard(1, trials=8, system="systems:quick")
        for other, said in ((self.shard(2, trials=9, system="systems:quick"), "trials (9 there, 8 in"),
                            (self.shard(2, 4, system="systems:quick"), "not shards of one plan"),
                            (self.shard(3, 3, system="systems:other"), "sampling")):
            self.assertIn(said, self.refused("report.py", one, other, "--out", self.folder / "r.json"))
            self.assertIn(said, self.refused("bench.py", "--log", one, "--log", other, "--convert", self.folder / "r.json"))

    def test_logs_without_a_shard_are_never_put_together(self):
        self.bench("--trials", 2)
        shutil.copy(self.log, self.folder / "copy.jsonl")
        systems = self.report(self.log, self.folder / "copy.jsonl", self.shard(1, 2, system="systems:quick", trials=2))[0]["systems"]
        self.assertEqual([system["not_run"] for system in systems], [0, 0, 9])
        self.assertIn("is the log of a whole plan", self.refused(
            "bench.py", "--log", self.log, "--log", self.folder / "quick.shard-1-of-2.jsonl", "--convert", self.folder / "r.json"))

    def test_shards_of_two_systems_are_two_systems(self):
        paths = [self.shard(number, 2, system=f"systems:journal={name}") for name in ("a", "b") for number in (1, 2)]
        written, _ = self.report(*paths)
        self.assertEqual([(system["system"]["name"], system["not_run"]) for system in written["systems"]], [("a", 0), ("b", 0)])
        self.assertEqual(len(written["comparisons"]), 1)

    def test_shard_is_resumed_and_another_shard_of_the_plan_does_not_continue_it(self):
        path = self.shard(1, 3, "--budget-s", 0)
        self.assertEqual(self.shard(1), path)
        self.assertEqual(len(self.read(path)[1]), 27)
        before = path.read_bytes()
        for shard in (["--shard", "2/3"], []):
            said = self.refused("bench.py", "--system", "systems:journal=m", "--log", path, "--trials", 8, *shard)
            self.assertIn('shard ("1/3" there, ', said)
        self.assertEqual(path.read_bytes(), before)

    def test_row_or_header_that_is_not_of_the_shard_is_refused(self):
        path = self.shard(1)
        text = path.read_text()
        path.write_text(text.replace('"trial":3,', '"trial":4,', 1))
        self.assertRegex(self.refused("report.py", path), r"line 11: trial 4 is not of the log's shard 1/3")
        for shard in ("0/3", "4/3", "1", "1/3 ", ""):
            path.write_text(text.replace('"shard":"1/3"', f'"shard":"{shard}"', 1))
            self.assertIn("line 1: the header's `shard` is", self.refused("report.py", path))

    def test_shard_that_is_none_is_refused_by_the_command_line(self):
        for shard in ("0/2", "3/2", "1", "a/b", "", "1/0", "01/2", "1/2/3", "-1/2"):
            self.assertIn("is not I/N with I from 1 to N", self.run_script("bench.py", f"--shard={shard}", status=2)[1])

    def test_more_shards_than_trials(self):
        for number in (1, 2, 3):
            self.shard(number, trials=2)
        system, = self.report(*self.folder.glob("m.shard-*"))[0]["systems"]
        self.assertEqual(system["not_run"], 0)

    def test_report_without_inputs_puts_the_shards_in_runs_together(self):
        folder = self.project()
        for number in (1, 2):
            self.run_script(str(folder / "bench.py"), "--trials", 3, "--shard", f"{number}/2")
        out, _ = self.run_script(str(folder / "report.py"))
        self.assertIn("from embedded-triage.shard-1-of-2.jsonl and 1 more\n", out)
        self.assertNotIn("not run)\n", out.partition("case ")[0])

    def test_failures_of_shards_are_printed_with_each_trial_once(self):
        out = self.report(self.shard(1), self.shard(2), "--case", "late-order")[1]
        self.assertEqual(re.findall(r"late-order, trial (\d)", out), ["0", "3", "6", "1", "4", "7", "2", "5"])


class MoreTrialsLater(BenchTest):
    INSIDE = True

    def setUp(self):
        super().setUp()
        self.old = self.folder / "old.jsonl"
        self.run_script("bench.py", "--system", "systems:journal=m", "--log", self.old, "--trials", 3)

    def extend(self, *args, trials=5, **kwargs):
        return self.bench("--trials", trials, "--extend", self.old, *args, system="systems:journal=m", **kwargs)

    def digest(self, path):
        return self.run_script("outputs_digest.py", path)[0].split()[:2]

    def test_extended_log_is_what_a_run_of_the_larger_number_would_have_left(self):
        before = self.old.read_bytes()
        self.assertEqual(self.extend()[0], "m: planned 45, already logged 27, ran 18, not run 0\n")
        self.assertEqual(self.old.read_bytes(), before)
        header, *lines = self.log.read_bytes().splitlines(keepends=True)
        self.assertEqual(lines[:27], before.splitlines(keepends=True)[1:])
        self.assertEqual(json.loads(header), json.loads(before.splitlines()[0]) | {"trials": 5})
        self.assertIn("resumed_at", json.loads(lines[27]))
        self.assertEqual([row["metadata"]["session"] for row in self.rows()], [0] * 27 + [1] * 18)
        whole = self.folder / "whole.jsonl"
        self.run_script("bench.py", "--system", "systems:journal=m", "--log", whole, "--trials", 5)
        self.assertEqual(self.digest(self.log), self.digest(whole))
        self.assertEqual(self.report()[0]["systems"][0]["not_run"], 0)

    def test_same_command_resumes_it(self):
        self.extend("--budget-s", 0)
        self.assertEqual(self.extend()[0], "m: planned 45, already logged 27, ran 18, not run 0\n")
        self.assertEqual(self.extend()[0], "m: planned 45, already logged 45, ran 0, not run 0\n")

    def test_stopped_or_cut_log_is_extended_by_what_it_holds(self):
        whole = self.old.read_bytes()
        lines = whole.splitlines(keepends=True)
        for content, held in ((whole + b'{"case_id":"ch', 27), (whole.removesuffix(b"\n"), 27), (b"".join(lines[:11]), 10)):
            self.old.write_bytes(content)
            self.log.unlink(missing_ok=True)
            self.assertIn(f"already logged {held}, ran {45 - held}, not run 0", self.extend()[0])
            self.assertEqual(len(self.rows()), 45)

    def test_dry_run_counts_what_would_be_copied(self):
        out, _ = self.extend("--dry-run")
        self.assertIn("planned 45, already logged 27, to run 18", out)
        self.assertFalse(self.log.exists())

    def test_shard_is_extended(self):
        for trials, more in ((3, []), (6, ["--extend", self.folder / "few.jsonl"])):
            self.run_script("bench.py", "--system", "systems:journal=m", "--shard", "2/2", "--trials", trials,
                            "--log", self.folder / ("many.jsonl" if more else "few.jsonl"), *more)
        header, *lines = map(json.loads, (self.folder / "many.jsonl").read_text().splitlines())
        self.assertEqual([line["trial"] for line in lines if "trial" in line], [1] * 9 + [3] * 9 + [5] * 9)
        self.assertEqual((header["trials"], header["shard"]), (6, "2/2"))

    def test_refused_and_nothing_begun(self):
        cases = self.cases_file(case())
        for changed, said in (({"--trials": 3}, "has 3 trials of each case already; name more with --trials"),
                              ({"--trials": 2}, "has 3 trials of each case already"),
                              ({"--system": "systems:quick"}, "system.name"),
                              ({"--shard": "1/2"}, 'shard (null there, "1/2" in this run)'),
                              ({"--cases": cases}, "was made from another case set"),
                              ({"--log": self.old}, "--extend begins a new log"),
                              ({"--extend": self.folder / "none.jsonl"}, "none.jsonl: No such file")):
            with self.subTest(changed):
                options = {"--system": "systems:journal=m", "--trials": 5, "--log": self.log, "--extend": self.old} | changed
                self.assertIn(said, self.refused("bench.py", *itertools.chain(*options.items())))
        self.assertFalse(self.log.exists())

    def test_log_that_is_there_and_does_not_begin_with_its_trials_is_left_alone(self):
        self.bench("--trials", 5, "--budget-s", 0, system="systems:journal=m")
        before = self.log.read_bytes()
        self.assertIn("does not begin with the trials of", self.refused(
            "bench.py", "--system", "systems:journal=m", "--log", self.log, "--trials", 5, "--extend", self.old))
        self.assertEqual(self.log.read_bytes(), before)

    def test_line_of_the_old_log_that_is_wrong_is_named(self):
        self.old.write_text(self.old.read_text().replace('"trial":1,', '"trial":7,', 1))
        self.assertIn("old.jsonl: line 11: trial 7 is not in the plan of 3", self.refused(
            "bench.py", "--system", "systems:journal=m", "--log", self.log, "--trials", 9, "--extend", self.old))
        self.assertFalse(self.log.exists())


class SeveralSystems(BenchTest):
    INSIDE = True
    THREE = [word for name in "abc" for word in ("--system", f"systems:journal={name}")]

    def take_turns(self, *args, systems=THREE, trials=6, **kwargs):
        return self.run_script("bench.py", *systems, "--log-dir", self.folder / "logs", "--trials", trials, *args, **kwargs)

    def turns(self):
        """Return the (name, trial) of each turn in the journal, which is emptied: a turn runs every model's case."""
        lines = [line.split() for line in (self.folder / "journal.txt").read_text().splitlines() if "warm" not in line]
        (self.folder / "journal.txt").unlink()
        turns = [(key, [case_id for *_, case_id in lines]) for key, lines in itertools.groupby(lines, lambda line: tuple(line[:2]))]
        for key, case_ids in turns:
            self.assertEqual(case_ids, [case_id for case_id in DEVELOPMENT if case_id not in ("blank-message", "missing-body")], key)
        return [(name, int(trial)) for (name, trial), _ in turns]

    def test_each_system_runs_all_cases_of_a_trial_number_in_an_order_shuffled_for_each(self):
        out, _ = self.take_turns()
        self.assertEqual(out, "".join(f"{name}: planned 54, already logged 0, ran 54, not run 0\n" for name in "abc"))
        turns = self.turns()
        self.assertEqual([trial for _, trial in turns], [trial for trial in range(6) for _ in "abc"])
        orders = ["".join(name for name, _ in turns[start:start + 3]) for start in range(0, 18, 3)]
        self.assertEqual({"".join(sorted(order)) for order in orders}, {"abc"})
        self.assertGreater(len(set(orders)), 2)
        shutil.rmtree(self.folder / "logs")
        self.take_turns()
        self.assertEqual(self.turns(), turns)    # the generator is seeded

    def test_each_log_could_have_come_from_a_run_of_its_own(self):
        self.take_turns()
        for name in "abc":
            own, taken = self.folder / f"own-{name}.jsonl", self.folder / "logs" / f"{name}.jsonl"
            self.run_script("bench.py", "--system", f"systems:journal={name}", "--log", own, "--trials", 6)
            logs = [[json.loads(line) for line in path.read_text().splitlines()] for path in (own, taken)]
            self.assertEqual(*({key: log[0][key] for key in bench.COMPARED} for log in logs))
            self.assertEqual(*([(row["case_id"], row["trial"], row.get("output")) for row in log[1:]] for log in logs))
            out, _ = self.run_script("bench.py", "--system", f"systems:journal={name}", "--log", taken, "--trials", 6)
            self.assertIn("already logged 54, ran 0", out)

    def test_turns_go_on_where_they_were_stopped(self):
        self.take_turns()
        whole = self.turns()
        for name, lines in (("a", 40), ("b", 31), ("c", 40)):
            path = self.folder / "logs" / f"{name}.jsonl"
            path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
        out, _ = self.take_turns()
        self.assertIn("b: planned 54, already logged 30, ran 24, not run 0\n", out)
        rest = [line.split()[:2] for line in (self.folder / "journal.txt").read_text().splitlines() if "warm" not in line]
        seen = [(name, int(trial)) for (name, trial), _ in itertools.groupby(rest)]
        self.assertEqual(seen, [turn for turn in whole if turn in seen])
        for name in "abc":
            self.assertEqual(bench.read_log(self.folder / "logs" / f"{name}.jsonl", harness.load_cases(
                HERE / "cases.json", harness.load_task("triage_task"))).header["trials"], 6)

    def test_model_is_loaded_at_each_turn_unless_told_otherwise(self):
        for option, loads in ([], 1 + 2), (["--no-warmup"], 0):
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
            (self.folder / "journal.txt").write_text("")
            self.take_turns(*option, trials=2)
            self.assertEqual((self.folder / "journal.txt").read_text().count("a warm\n"), loads)

    def test_budget_stops_all_of_them(self):
        out, _ = self.take_turns("--budget-s", 0)
        self.assertEqual(out, "".join(f"{name}: planned 54, already logged 0, ran 0, not run 54 (stopped by the time budget)\n"
                                      for name in "abc"))

    def test_fault_of_one_ends_the_run_and_the_same_command_goes_on(self):
        (self.folder / "script.txt").write_text("ok away")
        two = ["--system", "systems:scripted", "--system", "systems:journal=b"]
        out, err = self.take_turns("--patience-s", 0, systems=two, status=1)
        self.assertIn("error: the server is away", err)
        self.assertEqual(len(out.splitlines()), 2)
        (self.folder / "script.txt").write_text("ok")
        out, _ = self.take_turns(systems=two)
        self.assertRegex(out, r"\Aquick: planned 54, already logged 1, ran 53, not run 0\nb: planned 54, .*, not run 0\n\Z")

    def test_system_that_is_not_ready_leaves_the_logs_of_the_others_as_they_were(self):
        self.take_turns("--budget-s", 0, trials=2)
        before = {path: path.read_bytes() for path in (self.folder / "logs").iterdir()}
        self.refused("bench.py", *self.THREE, "--system", "systems:rude", "--log-dir", self.folder / "logs", "--trials", 2)
        self.assertEqual({path: path.read_bytes() for path in (self.folder / "logs").iterdir()}, before)

    def test_interrupted_while_they_take_turns(self):
        process = self.start("bench.py", "--system", "systems:slow", "--system", "systems:journal=b", "--log-dir", "logs",
                             "--trials", 50, env={"SLOW_S": "0.02"})
        log = self.folder / "logs" / "quick.jsonl"
        while not (log.exists() and log.read_bytes().count(b"\n") > 12):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130, err)
        self.assertRegex(out, r"\Aquick: planned 450, already logged 0, ran \d+, not run \d+\nb: planned 450, .*\n\Z")
        self.assertEqual(err.count("the same command resumes"), 1)

    def test_what_cannot_go_together_is_refused_before_anything_is_begun(self):
        for args, said in ((["--log", "x.jsonl"], "name their --log-dir"), (["--extend", "x.jsonl"], "go with one --system"),
                           (["--convert", "x.json"], "go with one --system")):
            self.assertIn(said, self.run_script("bench.py", *self.THREE, *args, status=2)[1])
        self.assertIn("would share a log", self.refused("bench.py", "--system", "systems:quick", "--system", "systems:other",
                                                        "--log-dir", "logs"))
        self.assertIn("do not go together", self.run_script("bench.py", "--log", "a", "--log-dir", "b", status=2)[1])
        self.assertIn("a run has one --log", self.run_script("bench.py", "--log", "a", "--log", "b", status=2)[1])
        self.assertFalse((self.folder / "logs").exists())


class Stretches(BenchTest):
    """report.py counts a large log a stretch at a time, over several processes."""

    def in_stretches(self, *args, before="", status=0):
        """Run report.py with stretches of some twenty lines, in two processes; return (report, stdout, stderr)."""
        code = f"import os, sys, bench, harness, report\nbench.STRETCH = 4000\nos.sched_getaffinity = lambda pid: {{0, 1}}\n" \
               f"{before}\nsys.exit(harness.run_command(report.main))"
        done = subprocess.run([*PYTHON, "-c", code, *map(str, args), "--out", str(self.folder / "s.json")], cwd=self.folder,
                              env=ENVIRONMENT | {"PYTHONPATH": str(HERE)}, capture_output=True, encoding="utf-8", timeout=60)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return json.loads((self.folder / "s.json").read_text()) if not status else None, done.stdout, done.stderr

    def test_stretches_side_by_side_report_what_one_pass_does(self):
        self.bench("--trials", 30, "--budget-s", 0.05, system="systems:slow")    # two sessions, and one trial missing
        self.bench("--trials", 30, system="systems:slow", env={"SLOW_S": "0"})
        lines = self.log.read_bytes().splitlines(keepends=True)
        self.log.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
        in_one = self.report(self.log)[0]
        self.assertEqual(in_one["systems"][0]["not_run"], 1)
        self.assertEqual(len(in_one["systems"][0]["sessions"]), 2)
        self.assertEqual(self.in_stretches(self.log)[0], in_one)
        self.assertEqual(self.in_stretches(self.log, before="os.sched_getaffinity = lambda pid: {0}")[0], in_one)

    def test_trial_in_two_stretches_and_a_torn_line_within_are_named_by_their_line(self):
        self.bench("--trials", 30)
        lines = self.log.read_bytes().splitlines(keepends=True)
        self.log.write_bytes(b"".join([*lines, lines[1]]))
        self.assertIn(f"line {len(lines) + 1}: case charged-twice, trial 0 is in the log twice", self.in_stretches(self.log, status=1)[2])
        self.log.write_bytes(b"".join([*lines[:200], b"{\n", *lines[200:]]))
        self.assertIn("line 201 is not JSON", self.in_stretches(self.log, status=1)[2])

    @unittest.skipUnless(hasattr(os, "killpg"), "needs process groups")
    def test_signal_while_it_counts_ends_it_and_its_processes_without_a_word(self):
        (self.folder / "slow_task.py").write_text(
            "import time\nfrom pathlib import Path\n"
            "def check(case, output):\n    Path('counting').touch()\n    time.sleep(0.01)\nCHECKS = (('slow', check),)\n")
        self.bench("--trials", 60)
        code = "import os, sys, bench, harness, report\nbench.STRETCH = 4000\nos.sched_getaffinity = lambda pid: {0, 1}\n" \
               "sys.exit(harness.run_command(report.main))"
        for number, group, status in ((signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, -signal.SIGTERM)):
            with self.subTest(number=number, group=group):
                (self.folder / "counting").unlink(missing_ok=True)
                process = subprocess.Popen(
                    [*PYTHON, "-c", code, str(self.log), "--task", "slow_task", "--regrade", "--out", "s.json"], cwd=self.folder,
                    env=ENVIRONMENT | {"PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    start_new_session=True)
                while not (self.folder / "counting").exists():
                    time.sleep(0.01)
                (os.killpg if group else os.kill)(process.pid, number)
                # All who hold the pipes have ended when both are at their end.
                self.assertEqual((*process.communicate(timeout=30), process.returncode), (b"", b"", status))

    def test_process_that_is_killed_while_it_counts_is_said(self):
        (self.folder / "deadly.py").write_text(
            "import multiprocessing, os\n"
            "def check(case, output):\n    if multiprocessing.parent_process(): os._exit(9)\nCHECKS = (('deadly', check),)\n")
        self.bench("--trials", 30)
        self.assertIn("error: a process that counted trials was ended", self.in_stretches(
            self.log, "--task", "deadly", "--regrade", status=1)[2])

    def test_stretches_are_whole_lines_and_cover_the_log(self):
        self.bench("--trials", 30)
        real, bench.STRETCH = bench.STRETCH, 1000
        try:
            parts = list(bench.stretches(self.log))
        finally:
            bench.STRETCH = real
        lines = [line for part in parts for line in bench.read_lines(self.log, *part)]
        self.assertGreater(len(parts), 10)
        self.assertEqual(lines, list(bench.read_lines(self.log))[1:])


class Readme(BenchTest):
    """What the README says is so."""

    README = (HERE / "README.md").read_text(encoding="utf-8")

    def says(self, text):
        self.assertTrue(text in self.README, f"the README does not say {text!r}")

    def test_example_is_what_the_report_prints(self):
        _, out = self.report(HERE / "recorded" / "smollm2.jsonl")
        block = out.partition("\n\n")[0]
        self.says("".join(f"    {line}\n" for line in block.splitlines()))

    def test_every_file_is_listed(self):
        for name in (*SCRIPTS, "test_bench.py", *os.listdir(HERE / "recorded")):
            self.says(name)

    def test_its_own_system_runs(self):
        (self.folder / "my_system.py").write_text(re.search(r"```python\n(.*?)```", self.README, re.S)[1])
        out, _ = self.bench(system="my_system:coin")
        self.assertEqual(out, "coin: planned 90, already logged 0, ran 90, not run 0\n")

    def test_every_name_of_a_faulty_reply_is_explained(self):
        kinds = [kind.__name__ for kind in model_triage.ReplyError.__subclasses__()]
        for name in (*kinds, "JSONDecodeError", "UnloggableOutput", "NotRun"):
            self.says(f"| `{name}` |")

    def test_every_option_is_explained(self):
        out = "".join(self.run_script(script, "--help")[0] for script in ("bench.py", "report.py"))
        for option in set(re.findall(r"--[a-z-]+", out)) - {"--help"}:
            self.says(option)

    def test_test_command_is_what_ci_runs(self):
        self.says("\n    python3 -m unittest\n")
        if (HERE / ".ci" / "run").exists():
            self.assertIn("'python3 -m unittest'", (HERE / ".ci" / "run").read_text())


if __name__ == "__main__":
    unittest.main()
