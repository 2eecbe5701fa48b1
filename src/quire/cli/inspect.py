"""`quire inspect`: what a model file holds, what it would take, and what is wrong with it."""

import argparse
from typing import TYPE_CHECKING, Any

from quire.cli.options import DEFAULT_MODEL, add_trust_option
from quire.cli.results import complain, print_json, printable

if TYPE_CHECKING:
    from quire.cli.inspection import Facts, Inspection

_EPILOG = """\
Nothing is unpacked, so this is quick for any size. Exit code 1 means that quire would not run it.

examples:
  quire inspect                    the default model
  quire inspect model.gguf
  quire inspect folder/ --json
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="look into a model file",
        description="Show a model's sizes, tensors by type, tokenizer, memory, and what is wrong.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a GGUF file, a safetensors folder, or a name (default: %(default)s)",
    )
    add_trust_option(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    from quire.cli.inspection import inspect_model
    from quire.core.errors import ConfigError
    from quire.llm.assembly import tell_on_terminal
    from quire.loader.defaults import DUMMY_PREFIX, resolve

    if args.model.startswith(DUMMY_PREFIX):
        raise ConfigError(
            f"{args.model} is made in memory and has no file to look into; "
            "`quire bench make-model` writes it as one"
        )
    path = resolve(args.model, tell_on_terminal)
    found = inspect_model(args.model, path, trusted=args.trust_model_file)
    if args.json:
        print_json({**found.sections, "problems": found.problems})
    else:
        _print(found)
    for problem in found.problems:
        complain(problem)
    return 1 if found.problems else 0


def _print(found: "Inspection") -> None:
    writers = {
        "file": _file_lines,
        "model": _model_lines,
        "tensors": _tensor_lines,
        "tokenizer": _tokenizer_lines,
        "memory": _memory_lines,
        "norms": _norm_lines,
        "isolation": _isolation_lines,
    }
    for section, lines in writers.items():
        if section in found.sections:
            for number, line in enumerate(lines(found.sections[section])):
                print(f"{section if number == 0 else '':<10} {printable(line)}")


def _file_lines(facts: "Facts") -> list[str]:
    from quire.llm.kv_memory import format_bytes

    name = f"{facts['name']}, " if facts["name"] else ""
    architecture = facts["architecture"] or "unknown architecture"
    kind = {"gguf": "GGUF", "safetensors": "safetensors"}[facts["format"]]
    return [facts["path"], f"{name}{architecture}, {kind}, {format_bytes(facts['bytes'])}"]


def _model_lines(facts: "Facts") -> list[str]:
    lines = [
        f"{facts['num_layers']} layers, hidden {facts['hidden_size']}, feed-forward "
        f"{facts['ffn_size']} ({facts['activation']})",
        f"{facts['num_heads']} heads and {facts['num_kv_heads']} KV heads of {facts['head_dim']}, "
        f"rope base {facts['rope_base']:g}" + _named(", ", facts["rope_scaling"]),
        f"context {facts['context_length']}, vocabulary {facts['vocabulary_size']}"
        + (", head tied to the embedding" if facts["tied_head"] else ""),
    ]
    if facts["sliding_windows"]:
        lines.append(f"sliding windows of {', '.join(map(str, facts['sliding_windows']))} tokens")
    return lines


def _tensor_lines(facts: "Facts") -> list[str]:
    from quire.llm.kv_memory import format_bytes

    rows = [
        f"{name:<7} {row['count']:>5}  {row['weights']:>15,}  {format_bytes(row['bytes']):>11}"
        for name, row in facts["by_type"].items()
    ]
    return [f"{facts['count']} tensors, {facts['weights']:,} weights", *rows]


def _tokenizer_lines(facts: "Facts") -> list[str]:
    if not facts["present"]:
        return ["none: the model takes and gives token ids"]
    ends = ", ".join(
        f"{text} ({token})"
        for text, token in zip(facts["end_tokens"], facts["end_token_ids"], strict=True)
    )
    template = "a chat template" if facts["chat_template"] else "no chat template"
    return [f"{facts['vocabulary_size']} tokens, {template}", f"ends with {ends or 'nothing'}"]


def _memory_lines(facts: "Facts") -> list[str]:
    from quire.llm.kv_memory import format_bytes

    sizes = {name: format_bytes(size) for name, size in facts.items() if isinstance(size, int)}
    total = format_bytes(facts["weights_in_reference_executor"] + facts["kv_per_context"])
    return [
        f"weights {sizes['weights_in_file']} as they lie in the file",
        *(_cpu_lines(facts["cpu"]) if facts["cpu"] is not None else []),
        f"reference executor: weights {sizes['weights_in_reference_executor']} in float32, keys "
        f"and values {sizes['kv_per_token']} a token, {total} for one whole context",
    ]


def _cpu_lines(facts: "Facts") -> list[str]:
    from quire.llm.kv_memory import format_bytes

    sizes = {name: format_bytes(size) for name, size in facts.items() if size is not None}
    return [
        f"cpu executor: weights {sizes['weights']} packed, keys and values "
        f"{sizes['kv_per_token']} a token ({sizes['kv_per_token_int8']} as int8)",
        f"              {sizes['peak']} at most in memory with one whole context",
    ]


def _norm_lines(facts: "Facts") -> list[str]:
    if facts["unsound"]:
        return [f"{facts['unsound']} of {facts['count']} look broken"]
    return [f"{facts['count']}, all sound: weights from {facts['low']:.3g} to {facts['high']:.3g}"]


def _isolation_lines(facts: "Facts") -> list[str]:
    if facts["in_force"]:
        return [f"read without privileges first: {', '.join(facts['in_force'])}"]
    return [f"not read without privileges first: {facts['why_not']}"]


def _named(before: str, name: str | None) -> str:
    return "" if name is None else before + name
