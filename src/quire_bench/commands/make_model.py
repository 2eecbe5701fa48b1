"""`quire bench make-model`: writes a dummy model as a GGUF file, for engines that need one."""

import argparse
from pathlib import Path

from quire.cli.program import print_json
from quire.llm.machine import format_bytes
from quire.loader.gguf_writer import write_gguf
from quire.model.dummy import DummyModel

_EPILOG = """\
examples:
  quire bench make-model --model dummy:llama-1b:Q4_K_M --out llama-1b.gguf
  quire bench make-model --model dummy:llama-8b:Q8_0 --out llama-8b.gguf

The weights are noise and there is no tokenizer: such a model measures speed and nothing else.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write dummy:SHAPE[:MIX[:SEED]] as a GGUF file that other engines read too."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, metavar="dummy:SHAPE:MIX", help="what to make")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to write it")
    parser.add_argument("--json", action="store_true", help="say in JSON what was written")


def run(args: argparse.Namespace) -> int:
    model = DummyModel(args.model)
    write_gguf(args.out, model.fields, model.planned)
    size = args.out.stat().st_size
    if args.json:
        print_json({"path": str(args.out), "model": model.name, "bytes": size})
    else:
        print(f"{args.out}: {model.name}, {len(model.planned)} tensors, {format_bytes(size)}")
    return 0
