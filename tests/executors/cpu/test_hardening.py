"""The native module is built so that a fault that is left is hard to make use of."""

import struct
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.executors.cpu.native import native

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
PF_X = 1
DT_FLAGS, DF_BIND_NOW = 30, 8
DT_TEXTREL = 22

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF is Linux's")


class Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    size: int


@pytest.fixture(scope="module")
def module() -> bytes:
    content = Path(native.__file__).read_bytes()
    assert content[:6] == b"\x7fELF\x02\x01"  # 64 bits, the lower byte first
    if b"__asan_init" in content:
        pytest.skip("the sanitizers watch over the same things")
    return content


def segments(content: bytes) -> list[Segment]:
    (start,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    found = []
    for index in range(count):
        kind, flags, offset, _, _, in_file = struct.unpack_from(
            "<IIQQQQ", content, start + index * size
        )
        found.append(Segment(kind, flags, offset, in_file))
    return found


def dynamic_entries(content: bytes) -> dict[int, int]:
    [table] = [segment for segment in segments(content) if segment.kind == PT_DYNAMIC]
    entries = struct.iter_unpack("<qQ", content[table.offset : table.offset + table.size])
    return dict(entries)


def test_addresses_that_calls_go_through_are_bound_at_once_and_read_only(module: bytes) -> None:
    assert any(segment.kind == PT_GNU_RELRO for segment in segments(module))
    assert dynamic_entries(module)[DT_FLAGS] & DF_BIND_NOW


def test_no_memory_is_both_written_and_run(module: bytes) -> None:
    [stack] = [segment for segment in segments(module) if segment.kind == PT_GNU_STACK]
    assert not stack.flags & PF_X
    assert not any(s.flags & PF_X and s.flags & 2 for s in segments(module))
    assert DT_TEXTREL not in dynamic_entries(module)


def test_smashed_stacks_and_overlong_copies_end_the_process(module: bytes) -> None:
    for name in (b"__stack_chk_fail", b"__memcpy_chk"):
        assert b"\0" + name + b"\0" in module
