"""`quire chat`: a conversation in the terminal, or line by line through a pipe."""

import argparse
import asyncio
import importlib
import io
import json
import sys
from contextlib import suppress

import quire  # whose names are imported at their first use: the model file is read meanwhile
from quire.cli.options import (
    add_model_options,
    add_sampling_options,
    length_limit,
    load,
    sampling_params,
)
from quire.cli.program import print_error, print_status
from quire.core.errors import RequestError

_HELP = "/clear begins anew, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"
_EPILOG = f"""\
{_HELP}.

examples:
  quire chat
  quire chat --model model.gguf --system "Answer in one sentence."
  printf 'My name is Ada.\\nWhat is my name?\\n' | quire chat --temperature 0
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Talk to a model. Through a pipe, every line is a message."
    parser.epilog = _EPILOG
    parser.add_argument("--system", metavar="TEXT", help="the system message, before all others")
    parser.add_argument("--json", action="store_true", help="print each answer as a line of JSON")
    add_model_options(parser)
    add_sampling_options(parser, temperature=0.7)


def run(args: argparse.Namespace) -> int:
    sampling_params(args)  # what is wrong is said before loading
    with asyncio.Runner() as runner:
        llm = load(quire.AsyncLLM, args, max_batch_size=1)
        try:
            _ = llm.prompts.template
            return _Chat(args, llm, runner).run()
        finally:
            runner.run(llm.close())


class _Chat:
    """The loop: read a message, print the answer, remember both."""

    def __init__(
        self, args: argparse.Namespace, llm: "quire.AsyncLLM", runner: asyncio.Runner
    ) -> None:
        self._args = args
        self._llm = llm
        self._runner = runner
        self._is_interactive = sys.stdin.isatty()
        if self._is_interactive:
            with suppress(ImportError):  # not everywhere; it makes input() editable
                importlib.import_module("readline")
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        self._messages: list[dict[str, str]] = []
        self._clear()

    def run(self) -> int:
        code = 0
        if self._is_interactive:
            print_status(f"{self._args.model}: {_HELP}.")
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/clear":
                    self._clear()
                case "/help":
                    print_status(_HELP)
                case message:
                    code |= self._say(message)
        return 0 if self._is_interactive else code

    def _clear(self) -> None:
        system = self._args.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def _read(self) -> str | None:
        """The next line; None at the end. Ctrl-C drops what was typed so far."""
        if not self._is_interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input("> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                print_status(_HELP)

    def _say(self, message: str) -> int:
        """Answer a message; one that cannot be answered is taken back."""
        self._messages.append({"role": "user", "content": message})
        said: list[str] = []
        try:
            reason = self._runner.run(self._answer(said))
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            reason = "cancelled"
        except RequestError as error:
            self._messages.pop()
            print_error(f"{error} (/clear begins anew)")
            return 1
        text = "".join(said)
        self._messages.append({"role": "assistant", "content": text})
        if self._args.json:
            print(json.dumps({"text": text, "finish_reason": reason}, ensure_ascii=False))
        else:
            print()
        sys.stdout.flush()
        return 0

    async def _answer(self, said: list[str]) -> str | None:
        """Print the answer as it comes, and put it into `said`; why it ended."""
        prompt = self._llm.prompts.read_chat(self._messages)
        params = sampling_params(self._args)
        reason = None
        async for piece in self._llm.stream(prompt.tokens, params):
            said.append(piece.text)
            reason = piece.finish_reason
            if not self._args.json:
                print(piece.text, end="", flush=True)
        if reason == "length":
            print_status(f"\n[stopped at {length_limit(params)}]")
        return reason
