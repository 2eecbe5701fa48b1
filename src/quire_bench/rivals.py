"""Other engines to be measured beside quire: packages in processes of their own, and servers.

A rival that is not there is no failure of the run: RivalMissingError says how to get it.
"""

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import IO, Any, NamedTuple, Protocol

from quire.core.errors import ConfigError, ExecutorError
from quire_bench.lengths import prompt_text
from quire_bench.load import PlannedRequest, Target, check_server, closed_loop, find_model, run
from quire_bench.receipts import RivalFacts

WORKER = Path(__file__).with_name("rival_worker.py")
PACKAGES = {
    "llama.cpp": "llama-cpp-python",
    "openvino": "openvino-genai",
    "transformers": "transformers torch gguf accelerate",
}
_CLOSE_TIMEOUT_S = 10.0
_SHOWN_CHARACTERS = 300  # of what a worker said last


class RivalMissingError(ConfigError):
    """A rival that is not installed or does not answer; says how to get it."""


class RivalFailedError(ExecutorError):
    """A rival that was there and broke."""


class Timing(NamedTuple):
    """What one batch took a rival; None where it is not known."""

    seconds: float
    num_prompt_tokens: int
    num_new_tokens: int
    prompt_s: float | None = None
    completion_s: float | None = None
    num_sequences: int = 0  # each has one token by the time its prompt is read

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second: over the whole run, and of each phase where it is known."""
        rates = {"output_tokens_per_second": self.num_new_tokens / self.seconds}
        if self.prompt_s:
            rates["prompt_tokens_per_second"] = self.num_prompt_tokens / self.prompt_s
        later_tokens = self.num_new_tokens - self.num_sequences
        if self.completion_s and later_tokens > 0:
            rates["completion_tokens_per_second"] = later_tokens / self.completion_s
        return rates


class Rival(Protocol):
    """An engine that is ready to be measured. Close it when done."""

    @property
    def name(self) -> str: ...
    @property
    def facts(self) -> RivalFacts: ...  # version, and how it runs
    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a rival's package is run: by which interpreter, and on what."""

    python: str = sys.executable
    threads: int = 1
    use_gpu: bool = False
    timeout_s: float = 600.0  # for one answer
    repack: bool = True  # llama.cpp's weights, for the processor's widest instructions


class PackageRival:
    """A Python package in a process of its own (rival_worker.py)."""

    def __init__(self, name: str, model: Path, settings: WorkerSettings) -> None:
        self.name = name
        self._settings = settings
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        try:
            self._process = subprocess.Popen(
                [settings.python, str(WORKER), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        except OSError as error:
            self._said.close()
            raise ConfigError(
                f"--python-for {name}: {settings.python} does not run: {error.strerror or error}"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()
        try:
            self.facts = self._open(model)
        except BaseException:
            self.close()
            raise

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._answers.put(line)
        self._answers.put("")  # the end
        output.close()

    def _open(self, model: Path) -> RivalFacts:
        settings = self._settings
        options: dict[str, Any] = {
            "model": str(model),
            "threads": settings.threads,
            "use_gpu": settings.use_gpu,
        }
        if not settings.repack and self.name == "llama.cpp":
            options["repack"] = False
        answer = self._ask({"open": options}, "ready", "missing")
        if "missing" in answer:
            raise RivalMissingError(
                f"{self.name} was not measured: {answer['missing']} is not installed; "
                f"`pip install {PACKAGES[self.name]}` gets it, or --python-for {self.name}=PATH "
                "names the interpreter that has it"
            )
        ready = answer["ready"]
        return {"version": str(ready["version"]), "about": str(ready["about"])}

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        question = {"run": {"prompts": prompts, "new_tokens": new_tokens}}
        answer = self._ask(question, "tokens")
        lengths = [len(tokens) for tokens in answer["tokens"]]
        if lengths != [new_tokens] * len(prompts):
            raise RivalFailedError(
                f"{self.name} gave {lengths} tokens, not {new_tokens} for each of {len(prompts)}"
            )
        return Timing(
            answer["seconds"],
            sum(map(len, prompts)),
            sum(lengths),
            answer["prompt_s"],
            answer["completion_s"],
            len(prompts),
        )

    def _ask(self, question: dict[str, Any], *keys: str) -> dict[str, Any]:
        """The answer, which has one of the keys."""
        line = self._exchange(json.dumps(question) + "\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise RivalFailedError(f"{self.name} answered {line[:100]!r}, not JSON") from None
        if isinstance(answer, dict) and "error" in answer:
            raise RivalFailedError(f"{self.name} failed: {answer['error']}; {self._last_words()}")
        if not isinstance(answer, dict) or not any(key in answer for key in keys):
            raise RivalFailedError(f"{self.name} answered {line[:100]!r}: no {' or '.join(keys)}")
        return answer

    def _exchange(self, question: str) -> str:
        try:
            self._input.write(question)
            self._input.flush()
            line = self._answers.get(timeout=self._settings.timeout_s)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            self._process.kill()  # it would compute on while others are measured
            raise RivalFailedError(
                f"{self.name} did not answer within {self._settings.timeout_s:g} s (--timeout)"
            ) from None
        if not line:
            raise RivalFailedError(
                f"{self.name} ended unasked{self._cause()}; {self._last_words()}"
            )
        return line

    def _cause(self) -> str:
        """The signal that ended it; an illegal instruction has a known way round."""
        code = self._end()
        if code == -signal.SIGILL and self.name == "llama.cpp":
            return " by SIGILL: it uses instructions that this machine refuses (try --no-repack)"
        return f" by {signal.Signals(-code).name}" if code < 0 else ""

    def _last_words(self) -> str:
        self._said.seek(0)
        words = " ".join(self._said.read().decode(errors="replace").split())
        return f"it said …{words[-_SHOWN_CHARACTERS:]}" if words else "it said nothing"

    def _end(self) -> int:
        """Wait for the process's end, though not for ever; its exit code."""
        try:
            return self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """The end of its input ends a worker; one that does not end is killed."""
        with suppress(BrokenPipeError):  # it is gone already
            self._input.close()
        self._end()
        self._reader.join()
        self._said.close()


class ServerRival:
    """An OpenAI-compatible server: as many clients as sequences, each with one request.

    It gets words, not token ids, and its time includes HTTP: the receipt says so.
    """

    def __init__(self, url: str, target: Target, seed: int = 0) -> None:
        self.name = url
        self._rng = Random(seed)
        try:
            model = target.model or run(find_model(target))
            self._target = replace(target, model=model)
            run(check_server(self._target))
        except ConfigError as error:
            raise RivalMissingError(f"{url} was not measured: {error}") from error
        self.facts: RivalFacts = {
            "version": "unknown",
            "about": f"server, over HTTP; model {model}",
        }

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        requests = [
            PlannedRequest(prompt_text(self._rng, len(prompt)), new_tokens) for prompt in prompts
        ]
        load = run(closed_loop(self._target, iter(requests), len(requests)))
        for outcome in load.outcomes:
            if outcome.error is not None:
                raise RivalFailedError(f"{self.name} failed, {outcome.error}: {outcome.detail}")
            if outcome.completion_tokens != new_tokens:
                raise RivalFailedError(
                    f"{self.name} gave {outcome.completion_tokens} tokens, not {new_tokens}: "
                    "does it heed ignore_eos?"
                )
        return Timing(load.seconds, sum(map(len, prompts)), new_tokens * len(prompts))

    def close(self) -> None:
        """Nothing to do: every request has a connection of its own."""
