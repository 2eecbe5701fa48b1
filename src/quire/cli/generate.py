"""`quire generate` completes prompts, many at once; one alone is printed as it comes. `quire chat`
is a conversation in the terminal, or line by line through a pipe.
"""

import argparse
import asyncio
import importlib
import io
import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire  # whose names are imported at their first use: the model file is read meanwhile
from quire.cli.options import (
    add_model_options,
    add_sampling_options,
    length_limit,
    load,
    sampling_params,
)
from quire.cli.program import print_error, print_json, print_status
from quire.core.errors import QuireError, RequestError
from quire.core.plan import TokenLogprob
from quire.core.request import Completion, RequestOutput
from quire.core.sampling import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from quire.llm.prompts import Prepared, Prompt, PromptReader

_MAX_FILE_BYTES = 64 << 20

_DESCRIPTION = """\
Complete prompts. A text is put to the model as a question where it knows how to chat; --raw goes
on where the text ends instead. Several prompts run together.
"""
_EPILOG = """\
examples:
  quire generate --prompt "What is gravity?"
  quire generate --prompt "Once upon a time" --raw --temperature 0.8 --seed 1 --max-tokens 64
  quire generate --prompt "Name a river." --prompt "Name a hill." --json
  cat question.txt | quire generate --model model.gguf
  quire generate --model no-tokenizer.gguf --prompt-tokens 1,2,3      prints token ids as well
"""


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    group = parser.add_argument_group("prompts (standard input, where none is given)")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated"
    )
    prompts.add_argument(
        "--prompt-tokens",
        action="append",
        type=_token_ids,
        metavar="1,2,3",
        help="a prompt of token ids, as they are; may be repeated",
    )
    prompts.add_argument(
        "--file",
        action="append",
        metavar="FILE",
        help="a file whose whole text is a prompt (- for standard input); may be repeated",
    )
    group.add_argument("--raw", action="store_true", help="go on with the text, do not chat")
    add_model_options(parser)
    add_sampling_options(parser, temperature=0.0)
    results = parser.add_argument_group("results")
    results.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt")
    results.add_argument("--json", action="store_true", help="print everything as JSON")
    for name in ("logprobs", "prompt-logprobs"):
        results.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            help="with --json: log-probabilities, and of the N likeliest tokens beside",
        )
    parser.set_defaults(usage_error=parser.error)


def _token_ids(text: str) -> list[int]:
    return [int(token) for token in text.split(",")]


_token_ids.__name__ = "list of token ids"  # argparse names it in errors


def generate(args: argparse.Namespace) -> int:
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        args.usage_error("--logprobs and --prompt-logprobs need --json")
    if args.chat_template and (args.raw or args.prompt_tokens):
        without = "--raw" if args.raw else "--prompt-tokens"
        args.usage_error(f"--chat-template does nothing with {without}, which does not chat")
    prompts = _prompts(args)
    _params(args)  # what is wrong is said before loading
    if len(prompts) == 1 and args.n == 1 and not args.json:
        return _stream(args, prompts[0])
    return _batch(args, prompts)


def _prompts(args: argparse.Namespace) -> "list[Prompt]":
    if args.prompt:
        return list(args.prompt)
    if args.prompt_tokens:
        return list(args.prompt_tokens)
    if not args.file and sys.stdin.isatty():
        args.usage_error("give --prompt, --prompt-tokens or --file, or pipe a text in")
    return [_read(name) for name in args.file or ["-"]]


def _read(name: str) -> str:
    """The text of a file; one newline at its end belongs to the file, not to the prompt."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror or error}") from None
    shown = "standard input" if name == "-" else name
    if len(content) > _MAX_FILE_BYTES:
        raise RequestError(f"{shown} is longer than {_MAX_FILE_BYTES} bytes")
    try:
        return content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(f"{shown} is no UTF-8 text: byte {error.start} is wrong") from None


# ---- one prompt, as it comes


def _stream(args: argparse.Namespace, prompt: "Prompt") -> int:
    llm = load(quire.AsyncLLM, args, max_batch_size=1)  # before the loop: Ctrl-C works at once
    prepared = _prepared(args, llm.prompts, prompt)
    params = _params(args, llm.sampling_defaults)
    asyncio.run(_print_stream(llm, prepared, params))
    return 0


async def _print_stream(
    llm: "quire.AsyncLLM", prepared: "Prepared", params: SamplingParams
) -> None:
    started = time.monotonic()
    count, reason, separator = 0, None, ""
    try:
        async for piece in llm.stream(prepared.tokens, params):
            if llm.tokenizer is None:
                text = separator + ",".join(map(str, piece.token_ids))
                separator = ","
            else:
                text = piece.text
            print(text, end="", flush=True)
            count += len(piece.token_ids)
            reason = piece.finish_reason
    finally:
        try:
            if count:
                print(flush=True)
        finally:
            await llm.close()  # also where the reader of the output has gone away
    elapsed = time.monotonic() - started
    why = (
        f"; stopped at {length_limit(params, llm.sampling_defaults)}" if reason == "length" else ""
    )
    print_status(
        f"[{len(prepared.tokens)} prompt tokens, {count} tokens in {elapsed:.1f} s, "
        f"{count / elapsed:.1f} tokens/s{why}]"
    )


# ---- many prompts, together


def _batch(args: argparse.Namespace, prompts: "list[Prompt]") -> int:
    with load(quire.LLM, args, max_batch_size=max(64, args.n)) as llm:
        outcomes = _outcomes(args, llm, prompts)
        has_text = llm.tokenizer is not None
    if args.json:
        pairs = zip(prompts, outcomes, strict=True)
        outputs = [_outcome_json(prompt, outcome) for prompt, outcome in pairs]
        print_json({"model": args.model, "outputs": outputs})
    num_failed = 0
    for number, outcome in enumerate(outcomes, 1):
        error = outcome if isinstance(outcome, RequestError) else outcome.error
        if error is not None:
            num_failed += 1
            print_error(f"prompt {number}: {error}")
        elif not isinstance(outcome, RequestError) and not args.json:
            _print_output(number, outcome, has_text=has_text)
    return 1 if num_failed else 0


def _outcomes(
    args: argparse.Namespace, llm: "quire.LLM", prompts: "list[Prompt]"
) -> list[RequestOutput | RequestError]:
    """What became of each prompt; one that cannot be read is refused alone."""
    read: list[Prepared | RequestError] = []
    for prompt in prompts:
        try:
            read.append(_prepared(args, llm.prompts, prompt))
        except RequestError as error:
            read.append(error)
    sound = [prepared for prepared in read if not isinstance(prepared, RequestError)]
    outputs = llm.generate(
        [prepared.tokens for prepared in sound],
        _params(args, llm.sampling_defaults),
        on_error="keep",
    )
    for prepared, output in zip(sound, outputs, strict=True):
        output.prompt = prepared.text
    in_order = iter(outputs)
    return [error if isinstance(error, RequestError) else next(in_order) for error in read]


def _params(args: argparse.Namespace, defaults: SamplingOptions | None = None) -> SamplingParams:
    return sampling_params(
        args,
        defaults,
        n=args.n,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
    )


def _outcome_json(prompt: "Prompt", outcome: RequestOutput | RequestError) -> dict[str, Any]:
    if not isinstance(outcome, RequestError):
        return _output_json(outcome)
    text = prompt if isinstance(prompt, str) else None
    return {"prompt": text, "completions": [], "error": _error_json(outcome)}


def _error_json(error: QuireError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def _output_json(output: RequestOutput) -> dict[str, Any]:
    """Everything known of a finished request, in JSON's types."""
    metrics = output.metrics
    scores = output.prompt_logprobs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": None if scores is None else list(map(_logprob_json, scores)),
        "completions": [_completion_json(completion) for completion in output.completions],
        "error": None if output.error is None else _error_json(output.error),
        "metrics": {
            "queued_s": metrics.queued_s,
            "time_to_first_token_s": metrics.time_to_first_token_s,
            "total_s": metrics.total_s,
            "num_cached_tokens": metrics.num_cached_tokens,
        },
    }


def _completion_json(completion: Completion) -> dict[str, Any]:
    scores = completion.logprobs
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": None if scores is None else list(map(_logprob_json, scores)),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _logprob_json(score: TokenLogprob) -> dict[str, Any]:
    return {
        "token": score.token,
        "logprob": score.logprob,
        "rank": score.rank,
        "top": [{"token": token, "logprob": logprob} for token, logprob in score.top],
    }


def _print_output(number: int, output: RequestOutput, *, has_text: bool) -> None:
    for completion in output.completions:
        which = f", completion {completion.index + 1}" if len(output.completions) > 1 else ""
        print(f"--- prompt {number}{which}")
        print(completion.text if has_text else ",".join(map(str, completion.token_ids)))


# ---- what a prompt means


def _prepared(args: argparse.Namespace, prompts: "PromptReader", prompt: "Prompt") -> "Prepared":
    """A text as a question where the model chats; anything else as it is."""
    if isinstance(prompt, str) and prompt and prompts.can_chat and not args.raw:
        return prompts.read_chat([{"role": "user", "content": prompt}])
    return prompts.read(prompt)


# ---- quire chat


_COMMAND = re.compile("/[a-z]+")  # a line that is no message; "/" in one is the user's
_CHAT_HELP = "/clear begins anew, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"
_CHAT_EPILOG = f"""\
{_CHAT_HELP}.

examples:
  quire chat
  quire chat --model model.gguf --system "Answer in one sentence."
  printf 'My name is Ada.\\nWhat is my name?\\n' | quire chat --temperature 0
"""


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Talk to a model. Through a pipe, every line is a message."
    parser.epilog = _CHAT_EPILOG
    parser.add_argument("--system", metavar="TEXT", help="the system message, before all others")
    parser.add_argument("--json", action="store_true", help="print each answer as a line of JSON")
    add_model_options(parser)
    add_sampling_options(parser, temperature=0.7)


def chat(args: argparse.Namespace) -> int:
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
            print_status(f"{self._args.model}: {_CHAT_HELP}.")
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/clear":
                    self._clear()
                case "/help":
                    print_status(_CHAT_HELP)
                case command if _COMMAND.fullmatch(command):
                    print_error(f"there is no command {command}: {_CHAT_HELP}")
                    code = 1
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
                print_status(_CHAT_HELP)

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
        params = sampling_params(self._args, self._llm.sampling_defaults)
        reason = None
        async for piece in self._llm.stream(prompt.tokens, params):
            said.append(piece.text)
            reason = piece.finish_reason
            if not self._args.json:
                print(piece.text, end="", flush=True)
        if reason == "length":
            print_status(f"\n[stopped at {length_limit(params, self._llm.sampling_defaults)}]")
        return reason
