"""Models by name: which file a name means, `quire pull`'s choice of a quant, and why."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.llm.devices import AUTO, DEVICES, Options
from quire.llm.machine import (
    DEFAULT_KV_BYTES,
    MemoryPlan,
    format_bytes,
    resident_memory,
)
from quire.llm.progress import ProgressBar
from quire.loader import defaults, hub
from quire.loader.hub import Hub, HubFile, ModelName, Repository, Variant
from quire.model.features import unsupported
from quire.model.isolated import examine
from quire.model.loading import load_model
from quire.quant.formats import FORMATS

# The first of these that a repository has is taken; a smaller one only where it does not fit.
_USUAL_QUANTS = (
    *(
        "Q4_K_M",
        "UD-Q4_K_XL",
        "Q4_K_L",
        "Q4_K_S",
        "IQ4_XS",
        "IQ4_NL",
        "Q4_0",
        "Q4_1",
        "MXFP4",
        "NVFP4",
    ),
    *("Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "I2_S", "TQ2_0", "BF16", "F16", "FP16", "F32"),
)
_OTHER_SPELLINGS = {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4"}
_MIXES = {"IQ2_M": "IQ2_S", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}  # by their main type
_HEADER_BYTES = (8 << 20, 48 << 20)  # how much of a file is asked for its header, one by one
_QUARTER = 4
_MOST_BESIDE = 16 << 30  # no model takes more beside its weights and the default cache

Notice = Callable[[str], None]


class Found(NamedTuple):
    """The files of a model, and why these."""

    path: Path
    bytes: int
    quant: str | None
    why: str


# ---- which file a name means


def find_model(model: str | Path, notice: Notice, device: str = AUTO) -> Path:
    """The path of a model by path or by name; a dummy's name is its path."""
    text = str(model)
    if isinstance(model, Path) or os.path.exists(text) or defaults.is_own(text):
        return defaults.resolve(model, notice)
    return locate(text, notice, device).path


def locate(text: str, notice: Notice, device: str = AUTO) -> Found:
    """A model on this machine, of whichever program; else one of the hub, which is fetched."""
    name = None if text.startswith("ollama:") else hub.parse_name(text)
    here = _here(text, name)
    if here is not None:
        notice(here.why)
        return here
    if name is None:
        raise ModelFileError(unknown(text))
    return fetch(name, notice, device)


def unknown(text: str) -> str:
    known = ", ".join(sorted([*defaults.DEFAULT_MODELS, *defaults.SHORT_NAMES]))
    return (
        f"{text or repr(text)} is neither a file or folder nor a known model ({known}). "
        "OWNER/REPO[:QUANT] names one of the Hugging Face hub, and `quire models` "
        "lists what is on this machine"
    )


def _here(text: str, name: ModelName | None) -> Found | None:
    """What this machine has under a name. Of several quants the usual one is taken."""
    if name is not None:
        found = _cached(name)
        if found is None and name.revision == hub.REVISION:  # llama.cpp keeps no other
            found = _in_llama_cpp(name)
        if found is not None:
            return found
    other = hub.find_other(text)
    if other is None:
        return None
    return Found(other.path, other.bytes, None, f"{text} is {other.origin}'s, in {other.path}")


def _cached(name: ModelName) -> Found | None:
    for snapshot in hub.snapshots(name.repo, name.revision):
        ranked = _ranked(hub.choose_named(name, snapshot.files), named=True)
        if ranked:
            path = snapshot.path(ranked[0])
            why = f"{name} is in the cache as {ranked[0].quant}"
            return Found(path, ranked[0].bytes, ranked[0].quant, why)
    return None


def _in_llama_cpp(name: ModelName) -> Found | None:
    paths = dict(hub.find_in_llama_cpp(name))
    ranked = _ranked(list(paths), named=True)
    if not ranked:
        return None
    path = paths[ranked[0]]
    return Found(path, ranked[0].bytes, ranked[0].quant, f"{name} is llama.cpp's, in {path}")


def fetch(name: ModelName, notice: Notice, device: str = AUTO) -> Found:
    """Fetch a model of the hub into its cache; without a network, what the cache holds."""
    source = Hub()
    try:
        repository = source.repository(name.repo, name.revision)
    except hub.UnreachableError as error:
        found = _cached(name)
        if found is None:
            raise ModelFileError(
                f"{error}; and nothing of {name} is on this machine (`quire models` lists what is)"
            ) from error
        notice(f"{error}; {found.why}, which is taken as it is")
        return found
    variant, why = choose(source, repository, name, device)
    notice(why)
    report = _Report(variant, notice)
    path = source.fetch(repository, variant, report.fetched, notice)
    report.finish()
    return Found(path, variant.bytes, variant.quant, why)


class _Report:
    """Percentage and rate: a bar on a terminal, else a line a quarter."""

    def __init__(self, variant: Variant, notice: Notice) -> None:
        self._total = variant.bytes
        self._notice = notice
        self._bar = ProgressBar(variant.bytes, estimate=True)
        self._begin: tuple[float, int] | None = None  # when the first bytes came, and of how many
        self._quarter = 0

    def fetched(self, done: int) -> None:
        now = time.monotonic()
        if self._begin is None:
            self._begin = (now, done)
            self._quarter = done * _QUARTER // self._total
        text = self._text(done, now)
        self._bar.update(done, text)
        if not self._bar.is_shown and done * _QUARTER // self._total > self._quarter:
            self._quarter = done * _QUARTER // self._total
            self._notice(text)

    def _text(self, done: int, now: float) -> str:
        assert self._begin is not None
        seconds = max(now - self._begin[0], 1e-3)
        rate = format_bytes((done - self._begin[1]) / seconds)
        return f"{done / self._total:.0%} of {format_bytes(self._total)}, {rate}/s"

    def finish(self) -> None:
        if self._begin is not None:
            self._bar.finish(self._total, self._text(self._total, time.monotonic()))


# ---- which quant suits the machine


class Room(NamedTuple):
    """Where a model is going to be, and how much there is of it; None: unknown."""

    available: int | None
    kind: str = "memory"
    is_gpu: bool = False

    def __str__(self) -> str:
        amount = "an unknown amount" if self.available is None else format_bytes(self.available)
        return f"{amount} of {self.kind}"


def room_of(device: str) -> Room:
    """A GPU's memory where the model would run there, else the machine's."""
    gpu = DEVICES["cuda"]
    if device in (AUTO, gpu.name) and gpu.why_unavailable() is None:
        return Room(gpu.available_memory(), "GPU memory", is_gpu=True)
    return Room(DEVICES["cpu"].available_memory())


class Need(NamedTuple):
    """Predicted bytes of memory of one variant, by the header of another of the same model."""

    plan: MemoryPlan | None  # None where no header could be read
    context_length: int
    of: Variant
    is_gpu: bool = False

    def bytes(self, variant: Variant) -> int:
        if self.plan is None:
            return variant.bytes + DEFAULT_KV_BYTES
        cache = min(self.plan.sequence_bytes(self.context_length), DEFAULT_KV_BYTES)
        process = 0 if self.is_gpu else resident_memory() or 0
        return self.plan.taken + variant.bytes - self.of.bytes + cache + process

    def fits(self, variant: Variant, room: Room) -> bool:
        return room.available is None or self.bytes(variant) <= room.available


def choose(
    source: Hub, repository: Repository, name: ModelName, device: str = AUTO
) -> tuple[Variant, str]:
    """The variant to fetch, and why."""
    found = hub.choose_named(name, repository.files)
    if not found:
        raise ModelFileError(nothing_there(repository, name))
    if name.quant is not None or name.file is not None or len(found) == 1:
        return found[0], _why_named(source, repository, name, found[0], room_of(device))
    ranked = _ranked(found, named=False)
    if not ranked:
        raise UnsupportedModelError(
            f"{name} has no quant that quire runs: {_listed(found)}; a name with :QUANT takes one "
            "all the same"
        )
    room = room_of(device)
    need = _need(source, repository, ranked[0], is_gpu=room.is_gpu)
    fitting = [one for one in ranked if need.fits(one, room)]
    if not fitting:
        raise ConfigError(
            f"no quant of {name} fits into the {room} that are available: the smallest, "
            f"{ranked[-1].quant}, would take {format_bytes(need.bytes(ranked[-1]))}. Take a "
            f"smaller model; a name with :QUANT is fetched all the same ({_listed(found)})"
        )
    return fitting[0], _why(name, ranked, fitting[0], need, room)


def _why_named(
    source: Hub, repository: Repository, name: ModelName, variant: Variant, room: Room
) -> str:
    """That the user wants it so, and a warning where it will not fit."""
    is_named = name.quant is not None or name.file is not None
    why = "as named" if is_named else "all that the repository has"
    text = f"{name}: {variant.quant}, {format_bytes(variant.bytes)}, {why}"
    if room.available is None or variant.bytes + _MOST_BESIDE < room.available:
        return text  # without a look at its header
    try:
        need = _need(source, repository, variant, is_gpu=room.is_gpu)
    except UnsupportedModelError:  # loading it will say so; it may be for another program
        return text
    if need.fits(variant, room):
        return text
    return (
        f"{text}; but it takes {format_bytes(need.bytes(variant))} of {room.kind}, and "
        f"{format_bytes(room.available)} are available: it will hardly run here"
    )


def _why(name: ModelName, ranked: list[Variant], taken: Variant, need: Need, room: Room) -> str:
    amount = "an unknown amount" if room.available is None else format_bytes(room.available)
    how = "by its header" if need.plan is not None else "by its size"
    first = ranked[0]
    is_smaller = taken != first
    smaller = f"{first.quant} would take {format_bytes(need.bytes(first))}; " * is_smaller
    return (
        f"{name}: {smaller}{taken.quant} takes {format_bytes(need.bytes(taken))} of {room.kind}, "
        f"predicted {how}, of {amount} available; other quants by {name.source}:QUANT"
    )


def nothing_there(repository: Repository, name: ModelName) -> str:
    found = hub.variants(repository.files)
    if not found:
        return f"{repository.name} holds no model that quire reads: no GGUF file, no safetensors"
    files = ", ".join(one.files[0].path for one in found)
    return f"{name} is not there: {repository.name} has " + (
        files if name.file is not None else _listed(found)
    )


def _listed(found: list[Variant]) -> str:
    return ", ".join(f"{one.quant} ({format_bytes(one.bytes)})" for one in found)


def _ranked(found: list[Variant], *, named: bool) -> list[Variant]:
    """The usual quant, then smaller ones, largest first. `named`: then the larger ones too."""
    able = [one for one in found if runs(one.quant)] or (found if named else [])
    if not able:
        return []
    usual = min(able, key=_rank)
    smaller = [one for one in able if one is not usual and one.bytes <= usual.bytes]
    larger = [one for one in able if named and one.bytes > usual.bytes]
    return [usual, *reversed(smaller), *larger]


def _rank(variant: Variant) -> tuple[int, int]:
    known = variant.quant in _USUAL_QUANTS
    place = _USUAL_QUANTS.index(variant.quant) if known else len(_USUAL_QUANTS)
    return place, variant.bytes


def runs(quant: str) -> bool:
    """Whether quire has the block format that a quant is named after; unknown names may do."""
    name = quant.removeprefix("UD-")
    name = _OTHER_SPELLINGS.get(name, _MIXES.get(name, name))
    known = {one.name for one in FORMATS}
    is_quant = hub.quant_of(f"{quant}.gguf") is not None
    return not is_quant or name in known or name.rpartition("_")[0] in known - {"F16", "F32"}


def predicted(source: Hub, repository: Repository, found: list[Variant], room: Room) -> Need | None:
    """What variants take; None where quire runs none of them."""
    ranked = _ranked(found, named=False)
    return _need(source, repository, ranked[0], is_gpu=room.is_gpu) if ranked else None


def _need(source: Hub, repository: Repository, variant: Variant, *, is_gpu: bool = False) -> Need:
    """What a variant takes, predicted from its header alone, which is read without privileges."""
    if variant.is_folder:
        return Need(None, 0, variant, is_gpu)
    for num_bytes in _HEADER_BYTES:
        with tempfile.TemporaryDirectory(prefix="quire-header-") as folder:
            first = Path(folder) / Path(variant.files[0].path).name
            for file in variant.files:
                start = source.fetch_start(repository, file, min(num_bytes, file.size))
                _write_sparse(first.with_name(Path(file.path).name), start, file)
            try:
                return _planned(first, variant, is_gpu=is_gpu)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{repository.name}: {error}") from error
            except ModelFileError:
                continue  # its header is longer
    return Need(None, 0, variant, is_gpu)


def _planned(path: Path, variant: Variant, *, is_gpu: bool) -> Need:
    examine(str(path), path, trusted=False).check()
    with load_model(path) as model:
        device = DEVICES["cuda" if is_gpu else "cpu"]
        if not is_gpu and (device.why_unavailable() or unsupported(model.spec, device.name)):
            return Need(None, 0, variant)
        # States of a larger batch are made where there is room.
        plan = device.memory_plan(model, Options(device=device.name, max_batch_size=1))
        return Need(plan, model.spec.context_length, variant, is_gpu)


def _write_sparse(path: Path, start: bytes, file: HubFile) -> None:
    """A file of the right size with its start alone; the rest takes no room and is never read."""
    with path.open("xb") as target:
        target.write(start)
        target.truncate(file.size)
