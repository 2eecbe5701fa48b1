"""BlockPool: reference counts, what lookup() finds, and the order of eviction."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcache import BlockPool


def take(pool: BlockPool) -> int:
    block = pool.allocate()
    assert block is not None
    return block


def evictable(pool: BlockPool, block_hash: bytes) -> int:
    """A block that is evictable: no references, but cached."""
    block = take(pool)
    assert pool.cache(block, block_hash)
    pool.release(block)
    return block


def test_every_block_is_handed_out_once_and_then_none() -> None:
    pool = BlockPool(4)
    assert sorted(take(pool) for _ in range(4)) == [0, 1, 2, 3]
    assert pool.allocate() is None
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_a_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(1)
    block = take(pool)
    pool.retain(block)
    pool.release(block)
    assert not pool.is_free(block)
    assert pool.allocate() is None
    pool.release(block)
    assert pool.is_free(block)
    assert pool.allocate() == block


def test_releasing_more_often_than_retaining_is_found() -> None:
    pool = BlockPool(1)
    block = take(pool)
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_empty_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    known = evictable(pool, b"a")
    assert known not in (take(pool), take(pool))
    assert pool.lookup(b"a") == known
    assert pool.allocate() == known
    assert pool.lookup(b"a") is None


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [evictable(pool, name) for name in (b"a", b"b", b"c")]
    pool.retain(blocks[0])  # used again: now the most recent
    pool.release(blocks[0])
    assert [take(pool) for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_an_evictable_block_is_revived_with_its_contents() -> None:
    pool = BlockPool(2)
    block = evictable(pool, b"a")
    pool.retain(block)
    assert pool.num_used == 1
    assert pool.lookup(b"a") == block
    pool.release(block)
    assert pool.lookup(b"a") == block


def test_contents_are_cached_in_one_block_only() -> None:
    pool = BlockPool(2)
    first, second = take(pool), take(pool)
    assert pool.cache(first, b"a")
    assert not pool.cache(second, b"a")
    assert not pool.cache(first, b"b"), "a block's contents do not change"
    assert pool.lookup(b"a") == first
    assert pool.lookup(b"b") is None
    assert pool.num_cached == 1


def test_a_block_without_references_cannot_be_cached() -> None:
    with pytest.raises(AssertionError, match="no references"):
        BlockPool(1).cache(0, b"a")


def test_only_an_unshared_uncached_block_is_writable() -> None:
    pool = BlockPool(2)
    block = take(pool)
    assert pool.is_writable(block)
    pool.retain(block)
    assert not pool.is_writable(block), "shared"
    pool.release(block)
    pool.cache(block, b"a")
    assert not pool.is_writable(block), "cached"
    pool.uncache(block)
    pool.release(block)
    assert not pool.is_writable(block), "free"


def test_an_uncached_block_is_not_found_and_keeps_its_references() -> None:
    pool = BlockPool(2)
    block = take(pool)
    pool.cache(block, b"a")
    pool.uncache(block)
    assert pool.lookup(b"a") is None
    assert not pool.is_free(block)
    assert pool.is_writable(block)


def test_an_evictable_block_that_is_uncached_is_empty_and_used_first() -> None:
    pool = BlockPool(2)
    first, second = evictable(pool, b"a"), evictable(pool, b"b")
    pool.uncache(second)
    assert pool.num_free == 2
    assert take(pool) == second
    assert pool.lookup(b"a") == first


def test_uncaching_a_block_that_is_not_cached_does_nothing() -> None:
    pool = BlockPool(2)
    pool.uncache(take(pool))
    assert pool.num_used == 1


# ---- corruption is found


def miscount(pool: BlockPool) -> None:
    pool._references[first_used(pool)] += 1


def lose_an_empty_block(pool: BlockPool) -> None:
    pool._empty.pop()


def free_a_used_block(pool: BlockPool) -> None:
    pool._empty.append(first_used(pool))


def free_a_block_twice(pool: BlockPool) -> None:
    pool._empty.append(pool._empty[-1])


def make_a_block_both_empty_and_evictable(pool: BlockPool) -> None:
    pool._evictable[pool._empty[-1]] = None


def cache_an_empty_block(pool: BlockPool) -> None:
    pool._hash_of[pool._empty[-1]] = b"x"


def uncache_an_evictable_block_by_half(pool: BlockPool) -> None:
    (block,) = pool._evictable
    del pool._block_of[pool._hash_of.pop(block)]


def find_another_block_than_is_cached(pool: BlockPool) -> None:
    pool._block_of[b"a"] = first_used(pool)


def find_a_block_that_is_not_cached(pool: BlockPool) -> None:
    pool._block_of[b"z"] = first_used(pool)


def first_used(pool: BlockPool) -> int:
    return next(block for block in range(pool.num_blocks) if not pool.is_free(block))


@pytest.mark.parametrize(
    "corrupt",
    [
        miscount,
        lose_an_empty_block,
        free_a_used_block,
        free_a_block_twice,
        make_a_block_both_empty_and_evictable,
        cache_an_empty_block,
        uncache_an_evictable_block_by_half,
        find_another_block_than_is_cached,
        find_a_block_that_is_not_cached,
    ],
)
def test_the_check_finds(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(5)
    evictable(pool, b"a")
    tables = [[take(pool), take(pool)]]
    pool.check_integrity(tables)
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_the_check_finds_a_table_that_was_not_counted() -> None:
    pool = BlockPool(2)
    block = take(pool)
    for tables in ([], [[block], [block]], [[block, 1 - block]]):
        with pytest.raises(AssertionError, match="in block tables"):
            pool.check_integrity(tables)


# ---- against a simple model


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool, compared with a model of references, contents and order of use."""

    @initialize(num_blocks=st.integers(1, 6))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references: list[int] = []  # a block for each reference
        self.content: dict[int, bytes] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()

    @rule()
    def allocate(self) -> None:
        free = set(range(self.pool.num_blocks)) - set(self.references)
        block = self.pool.allocate()
        if block is None:
            assert not free
            return
        assert block in free
        if free - self.evictable.keys():
            assert block not in self.evictable, "evicted a block with empty ones left"
        else:
            assert block == next(iter(self.evictable)), "not the least recently used"
        self.evictable.pop(block, None)
        self.content.pop(block, None)
        self.references.append(block)

    @rule(data=st.data())
    @precondition(lambda self: self.references or self.evictable)
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.references, *self.evictable})))
        self.pool.retain(block)
        self.evictable.pop(block, None)
        self.references.append(block)

    @rule(data=st.data())
    @precondition(lambda self: self.references)
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.release(block)
        self.references.remove(block)
        if block not in self.references and block in self.content:
            self.evictable[block] = None

    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    @precondition(lambda self: self.references)
    def cache(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        is_new = block not in self.content and name not in self.content.values()
        assert self.pool.cache(block, name) is is_new
        if is_new:
            self.content[block] = name

    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.uncache(block)
        self.content.pop(block, None)
        self.evictable.pop(block, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity([self.references])
        assert pool.num_used == len(set(self.references))
        assert pool.num_cached == len(self.content)
        for name in (b"a", b"b", b"c", b"d"):
            found = [block for block, content in self.content.items() if content == name]
            assert pool.lookup(name) == (found[0] if found else None)
        for block in range(pool.num_blocks):
            alone = self.references.count(block) == 1 and block not in self.content
            assert pool.is_writable(block) == alone


TestPoolAgainstItsModel = PoolMachine.TestCase
TestPoolAgainstItsModel.settings = settings(max_examples=100, stateful_step_count=40)
