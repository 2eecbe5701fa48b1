"""Fuzzes readers by random mutations that know the structure of their input, without coverage.

    python -m tests.fuzz.mutated all --runs 1000000 --seed 1

Several times as many inputs a second as with atheris: nothing is instrumented. JSON is mutated as a
tree, GGUF as bytes, numbers of 32 and 64 bits, and fields that are moved, doubled and swapped. One
seed gives the same inputs again. Any error but quire's own, and an input that takes more than ten
seconds or more memory than there is, ends the run with status 77; the input is kept.
"""

import argparse
import copy
import hashlib
import json
import random
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.inputs import TARGETS, Target, inputs_of
from tests.fuzz.kept import HOME

_FOUND = 77  # as libFuzzer's exit status
_SLOWEST_S = 10
_TELL_EVERY = 250_000
_MEMORY = 4 << 30
_EDGES = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 63, 127, 128, 255, 256, 4095, 2**15, 2**16 - 1, 2**31 - 1),
    *(2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1),
)
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, *_EDGES, -1, -(2**63), 2**70, 0.5, -0.0, 1e308, 1e-320),
    *(float("inf"), float("nan"), "", "x", "\0", "\ud800", "<s>", "é" * 40, "a" * 3000),
    *([], {}, [[]], [0, 0], [1] * 50, {"type": "Sequence"}, {"": {}}, {"Regex": "(a+)+$"}),
)


def mutated_bytes(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, doubled, moved, or taken from another input."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(changed) + 1)
        length = min(rng.choice((1, 1, 2, 4, 8, 12, 30, 200)), len(changed) - at)
        match rng.randrange(8):
            case 0:
                changed[at : at + length] = rng.randbytes(length)
            case 1:
                changed[at : at + 1] = bytes([rng.choice((0, 1, 127, 128, 255))])
            case 2:
                changed[at : at + 8] = struct.pack("<Q", rng.choice(_EDGES))
            case 3:
                changed[at : at + 4] = struct.pack("<I", rng.choice(_EDGES) & 0xFFFFFFFF)
            case 4:
                del changed[at : at + length]
            case 5:
                changed[at:at] = changed[at : at + length]
            case 6:
                start = rng.randrange(len(other) + 1)
                changed[at : at + length] = other[start : start + length]
            case _:
                if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.02 else changed)


def mutated_json(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """The tree changed where there is one, and its text where there is none."""
    if rng.random() < 0.3:
        return mutated_bytes(content, other, rng)
    first, _, second = content.partition(b"\0")
    if second.startswith(b"{") and rng.random() < 0.4:  # the second of two files
        return first + b"\0" + mutated_json(second, other.partition(b"\0")[2] or other, rng)
    begin = content.find(b"{")
    text, _, rest = content[begin:].partition(b"\0")
    try:
        tree, donor = json.loads(text), json.loads(other[other.find(b"{") :].partition(b"\0")[0])
    except (ValueError, RecursionError):
        return mutated_bytes(content, other, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change(tree, donor, rng)
    changed = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="replace")
    tail = b"\0" + rest if rest or rng.random() < 0.5 else b""
    return content[: max(begin, 0)] + changed + tail


def _change(tree: Any, donor: Any, rng: random.Random) -> None:
    """Change one place of a tree: another value, one taken away, doubled, or from elsewhere."""
    places = list(_places(tree))
    if not places:
        return
    parent, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            parent[key] = copy.deepcopy(rng.choice(_ODD_VALUES))
        case 2:
            del parent[key]
        case 3:
            source, at = rng.choice(list(_places(donor)) or [({0: 0}, 0)])
            parent[key] = copy.deepcopy(source[at])
        case 4 if isinstance(parent, dict):
            parent[rng.choice(("", "type", "pattern", "Regex", "vocab", "x"))] = parent.pop(key)
        case _:
            value = parent[key]
            if isinstance(value, int):
                parent[key] = value + rng.choice((-1, 1, 2**31, -value))
            else:
                parent[key] = [value, copy.deepcopy(value)]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree, as what holds it and its key there."""
    left = [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
                yield value, key
                left.append(inner)


def fuzz(name: str, runs: int, seed: int, tell: Callable[[str], None]) -> int:
    """How many of so many inputs were read to their end; the others were refused."""
    target, inputs = TARGETS[name], inputs_of(name)
    rng = random.Random(f"{name} {seed}")
    began, num_read = time.monotonic(), 0
    for number in range(runs):
        num_read += _run_one(name, target, _next_input(target, inputs, rng))
        if (number + 1) % _TELL_EVERY == 0:
            tell(f"{name}: {number + 1} of {runs} runs so far")
    took = time.monotonic() - began
    tell(
        f"{name}: {runs} runs, {num_read} read to the end, seed {seed}, {runs / took:.0f} a second"
    )
    return num_read


def _next_input(target: Target, inputs: list[bytes], rng: random.Random) -> bytes:
    content, other = rng.choice(inputs), rng.choice(inputs)
    mutate = mutated_json if target.is_json else mutated_bytes
    return mutate(content, other, rng)


def _run_one(name: str, target: Target, content: bytes) -> bool:
    signal.setitimer(signal.ITIMER_REAL, _SLOWEST_S)
    try:
        return target.feed(content)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        folder = HOME / name / "finds"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(content).hexdigest()[:16]
        path.write_bytes(content)
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}; kept in {path}", flush=True)
        raise SystemExit(_FOUND) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _on_alarm(*_: object) -> None:
    raise TimeoutError(f"the input took more than {_SLOWEST_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz readers by random mutations.")
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=100_000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _on_alarm)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for name in TARGETS if args.target == "all" else [args.target]:
        fuzz(name, args.runs, args.seed, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
