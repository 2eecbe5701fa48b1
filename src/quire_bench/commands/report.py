"""`quire bench report`: draws receipts as a page, as PNGs, and as tables in a Markdown file."""

import argparse
import sys
from pathlib import Path

from quire.cli.program import print_error, print_status
from quire.core.errors import ConfigError
from quire_bench.receipts import Receipt
from quire_bench.report import TITLE, gather, html, read_text, with_tables, write_pngs, write_text

STALE = 1  # the exit code of --check


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draws any set of receipts as one self-contained HTML page, as PNG files, or "
        "as tables between two marks of a Markdown file."
    )
    parser.epilog = (
        "examples: quire bench report receipts --out report.html --png pictures;  "
        "quire bench report receipts --markdown docs/performance-tables.md --check"
    )
    parser.add_argument(
        "receipts", nargs="+", type=Path, metavar="RECEIPTS", help="files, or folders of them"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write")
    parser.add_argument("--title", help="of the page (default: quire, measured)")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="where to put each chart")
    parser.add_argument(
        "--markdown",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file with the lines <!-- receipts: begin --> and <!-- receipts: end -->, between "
        "which the tables go, or <!-- headline: begin --> and <!-- headline: end --> for one of "
        "ratios and floors; may be repeated",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 unless the Markdown files hold these receipts' tables",
    )


def run(args: argparse.Namespace) -> int:
    if args.check and (not args.markdown or args.out or args.png):
        raise ConfigError("--check goes with --markdown alone")
    if args.out is None and args.png is None and not args.markdown:
        raise ConfigError("say what to make: --out FILE, --png FOLDER or --markdown FILE")
    if args.title is not None and args.out is None:
        raise ConfigError("--title is of the page: it goes with --out")
    receipts = gather(args.receipts)
    if args.out is not None:
        write_text(args.out, html(receipts, args.title or TITLE))
        print_status(f"wrote {args.out}")
    if args.png is not None:
        print_status(f"wrote {len(write_pngs(receipts, args.png))} pictures to {args.png}")
    return max([_markdown(args, path, receipts) for path in args.markdown], default=0)


def _markdown(args: argparse.Namespace, path: Path, receipts: list[Receipt]) -> int:
    document = read_text(path)
    wanted = with_tables(document, receipts, str(path))
    if document == wanted:
        return 0
    if args.check:
        words = " ".join(map(str, args.receipts))
        print_error(
            f"{path} does not match its receipts: run quire bench report {words} --markdown {path}"
        )
        return STALE
    write_text(path, wanted)
    print(f"wrote the tables of {path}", file=sys.stderr)
    return 0
