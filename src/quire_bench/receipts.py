"""Receipts: what one measurement asked for, what really ran, and every sample, as a JSON file.

    receipts/<kind>-<model>-<UTC time>-<first of its hash>.json

The shape is receipt.schema.json, which this module reads and holds every receipt to, on the way out
and on the way in; other tools can check receipts with the same file.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

from quire.core.errors import QuireError

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("receipt.schema.json")
DEFAULT_FOLDER = Path("receipts")
MAX_RECEIPT_BYTES = 64 << 20
_SHOWN_CHARACTERS = 200  # of what is wrong
MAX_SAMPLES = 500  # that loads keep of one name: receipts are committed

Facts = Mapping[str, object]  # in JSON's types; which, its kind says


class Model(TypedDict):
    name: str
    sha256: str | None  # None: no file
    quant: str | None
    parameters: NotRequired[int | None]
    packed_bytes: NotRequired[int]
    formats: NotRequired[dict[str, int]]  # how many tensors have each


class Machine(TypedDict):
    cpu: str | None
    cores: float
    memory_bytes: int | None
    gpu: str | None
    os: str
    architecture: NotRequired[str]


class Asked(TypedDict):
    """How the model was to be run, or where the server is."""

    device: str | None
    threads: NotRequired[int | None]
    kv_memory: NotRequired[str | None]
    kv_cache_dtype: NotRequired[str]
    url: NotRequired[str]
    ignore_eos: NotRequired[bool]


class RivalFacts(TypedDict):
    version: str
    about: str  # how it runs


class Executed(TypedDict):
    """What ran: the executor with its kernels, and why it is another than asked for, if it is."""

    device: str | None  # None: a server's, not known
    kernels: list[str]
    fallback: str | None
    rivals: NotRequired[dict[str, RivalFacts]]
    server: NotRequired[str | None]
    tokens_counted_by: NotRequired[str]


class GpuLimits(TypedDict, total=False):
    memory_read_bytes_per_second: float
    float16_operations_per_second: float


class Limits(TypedDict):
    """What the machine can do at best, and the receipt that says so."""

    receipt: str
    memory_read_bytes_per_second: float
    float32_operations_per_second: float
    integer_operations_per_second: NotRequired[float]
    gpu: NotRequired[GpuLimits]


class ReceiptError(QuireError):
    """A receipt that is broken, or that cannot be written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One measurement.

    `samples`: the values measured, of very many an even choice (`thinned`); `results`: numbers made
    from all of them, None where nothing could be measured. `limits`: where a limits receipt was
    given.
    """

    kind: str
    created: str  # ISO 8601
    command: Sequence[str]
    seed: int
    model: Model
    machine: Machine
    versions: Mapping[str, str]
    asked: Asked
    executed: Executed
    settings: Facts
    samples: Mapping[str, Sequence[float]]
    results: Facts
    limits: Limits | None = None


def now() -> str:
    """The time as `created` holds it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def deviation(receipt: Receipt) -> str | None:
    """How the run left the path asked for; None where it did not."""
    if receipt.executed["fallback"] is not None:
        return str(receipt.executed["fallback"])
    wanted, ran = receipt.asked["device"], receipt.executed["device"]
    if wanted in (None, "auto", ran):
        return None
    return f"device {wanted!r} was asked for, but {ran!r} ran"


def as_data(receipt: Receipt) -> dict[str, object]:
    """The receipt in JSON's types."""
    data: dict[str, object] = {"schema": SCHEMA_VERSION}
    for field in fields(receipt):
        data[field.name] = _plain(getattr(receipt, field.name))
    return data


def write(receipt: Receipt, folder: str | Path = DEFAULT_FOLDER) -> Path:
    """Check a receipt and put it into a folder, whole or not at all; where it is."""
    data = as_data(receipt)
    validate(data)
    text = _text(data)
    target = Path(folder) / _file_name(receipt, text)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".receipt-", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)  # mkstemp's files are for their owner alone
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ReceiptError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def thinned(values: Sequence[float]) -> list[float]:
    """At most MAX_SAMPLES, evenly chosen and still in order, to six digits."""
    step = max(1, math.ceil(len(values) / MAX_SAMPLES))
    return [float(f"{value:.6g}") for value in values[::step]]


def read(path: str | Path) -> Receipt:
    """A receipt from its file, checked."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECEIPT_BYTES + 1)
    except OSError as error:
        raise ReceiptError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"{path} is longer than {MAX_RECEIPT_BYTES} bytes: it is no receipt")
    try:
        data = json.loads(content, parse_constant=_refuse_constant)
        validate(data)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"{path} is no JSON: {error}") from None
    except ReceiptError as error:
        raise ReceiptError(f"{path}: {error}") from None
    return Receipt(**{field.name: data[field.name] for field in fields(Receipt)})


def read_folder(folder: str | Path, kind: str | None = None) -> dict[Path, Receipt]:
    """Every receipt of a folder, or those of one kind, oldest first by name."""
    pattern = "*.json" if kind is None else f"{kind}-*.json"
    found = {path: read(path) for path in sorted(Path(folder).glob(pattern))}
    return {path: receipt for path, receipt in found.items() if kind in (None, receipt.kind)}


def section(data: object, *path: str) -> Facts:
    """The mapping at this path of nested facts; an empty one where there is none."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def number(data: object, *path: str) -> float | None:
    """A number within nested facts; None where there is none."""
    value = section(data, *path[:-1]).get(path[-1])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def listed(data: object, *path: str) -> list[object]:
    """A list within nested facts; an empty one where there is none."""
    value = section(data, *path[:-1]).get(path[-1])
    return value if isinstance(value, list) else []


def validate(data: object) -> None:
    """Raise ReceiptError, naming the field, unless this is a receipt as the schema has it."""
    error = best_match(_validator().iter_errors(data))
    if error is not None:
        problem = error.message[-_SHOWN_CHARACTERS:]  # the value comes first, and can be long
        raise ReceiptError(f"the receipt's field {error.json_path}: {problem}")


@cache
def _validator() -> Any:
    """Of the schema; NaN and the infinities are no numbers, as JSON has none."""
    types = Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number)
    return extend(Draft202012Validator, type_checker=types)(schema())


def _is_number(_: object, value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


@cache
def schema() -> dict[str, Any]:
    """The schema as it is committed beside this module."""
    loaded: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return loaded


def _text(data: Facts) -> str:
    """JSON with a line a field, and lists of numbers on one."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    numbers = re.compile(r"\[\n([-+.\deE,\s]+)\]")  # no string holds a line's end
    return numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def _plain(value: object) -> object:
    """Plain dicts and lists for any mapping and sequence."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _file_name(receipt: Receipt, text: str) -> str:
    time = re.sub(r"\.\d+|[-:]", "", receipt.created)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{receipt.kind}-{slug(str(receipt.model['name']))}-{time}-{digest}.json"


def slug(name: str) -> str:
    """A name as it can stand in a file's name: the end of a path, few kinds of characters."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")[:80] or "unnamed"
