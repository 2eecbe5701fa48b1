"""Runs tests in forks of a process that has everything imported but the code under test.

A mutant is never written to disk: in its fork an import hook gives the mutated module. A fork ends
at the first test that fails, or that takes much longer than it did before.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType

import coverage
import pytest
from hypothesis import Phase, settings

PASSED, FAILED, TIMED_OUT = 0, 1, 124
_MEMORY_BYTES = 8 << 30  # an endless loop that collects something must not take the machine down
# Those that the tests import and that import nothing under test: imported once, before the forks.
_PRELOADED = (
    "asyncio", "numpy", "jinja2", "tokenizers", "hypothesis.stateful", "hypothesis.strategies",
    "quire.core.config", "quire.core.request", "quire.loader.defaults",
)  # fmt: skip


@dataclass(slots=True)
class Baseline:
    """What the unmutated tests do: which run which line, and the processor time of each."""

    tests_of: dict[str, dict[int, list[str]]] = field(default_factory=dict)  # by path and line
    seconds: dict[str, float] = field(default_factory=dict)

    def tests_for(self, path: Path, lines: range, longest: float | None = None) -> list[str]:
        """Tests that run these lines, the quickest first; for code that runs when the module is
        imported, all that run anything of it."""
        by_line = self.tests_of.get(str(path), {})
        chosen = {test for line in lines for test in by_line.get(line, [])}
        if not chosen or "" in chosen:
            chosen = {test for tests in by_line.values() for test in tests}
        quick = {test for test in chosen - {""} if not longest or self.seconds[test] <= longest}
        return sorted(quick, key=lambda test: self.seconds[test])


class _Baseliner:
    """A pytest plugin: a coverage context for each test, and its time."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self.num_failed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._measured.switch_context(item.nodeid)
        started = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - started
            self._measured.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_failed += report.failed


class _Judge:
    """A pytest plugin: no shrinking of random examples, and a limit on each test's time."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", settings.get_profile("repeatable"), phases=phases)
        settings.load_profile("mutation")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        usual_s = self._seconds.get(item.nodeid, 20.0)
        signal.setitimer(signal.ITIMER_PROF, 5.0 + 10 * usual_s)
        signal.setitimer(signal.ITIMER_REAL, 30.0 + 20 * usual_s)  # hangs without computing
        return (yield)


def preload() -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # their imports take longer than most tests
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()


def measure(tests: Sequence[str], sources: Sequence[Path]) -> Baseline:
    """Run the tests once, in a fork, with a coverage context for each."""
    target = Path("build/mutation/baseline.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    pid = _fork(lambda: _measure(tests, sources, target), is_silent=False)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) or not target.exists():
        raise SystemExit("the tests fail without any mutation: see above")
    return load(target)


def load(path: Path) -> Baseline:
    raw = json.loads(path.read_text())
    tests_of = {
        name: {int(line): tests for line, tests in lines.items()}
        for name, lines in raw["tests_of"].items()
    }
    return Baseline(tests_of, raw["seconds"])


def _measure(tests: Sequence[str], sources: Sequence[Path], target: Path) -> int:
    measured = coverage.Coverage(data_file=None, include=[str(path) for path in sources])
    measured.start()
    plugin = _Baseliner(measured)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not long", *tests], [plugin])
    measured.stop()
    data = measured.get_data()
    tests_of = {
        str(path): data.contexts_by_lineno(str(path))
        for path in sources
        if str(path) in data.measured_files()
    }
    target.write_text(json.dumps({"tests_of": tests_of, "seconds": plugin.seconds}))
    return int(status)


def start(module: str, path: Path, code: str, tests: Sequence[str], baseline: Baseline) -> int:
    """Run tests with a module replaced, in a fork; its process id."""

    def judge() -> int:
        sys.meta_path.insert(0, _Replacing(module, path, code))
        for expiry in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(expiry, lambda *_: os._exit(TIMED_OUT))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long"]
        return int(pytest.main([*options, *tests], [_Judge(baseline.seconds)]))

    return _fork(judge, is_silent=True)


def _fork(work: Callable[[], int], *, is_silent: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        if is_silent:
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silence, stream)
        status = work()
        sys.stdout.flush()
    except BaseException:
        os._exit(FAILED)
    os._exit(status)


class _Replacing(importlib.machinery.SourceFileLoader):
    """Finds one module, and loads it from code that is not in its file."""

    def __init__(self, module: str, path: Path, code: str) -> None:
        super().__init__(module, str(path))
        self._code = code

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._code, self.path, "exec", dont_inherit=True)
