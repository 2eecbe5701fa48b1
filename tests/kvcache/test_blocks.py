"""BlockPool: who holds which block, what can be found again, and which block is given up first."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcache.blocks import BlockPool


def take(pool: BlockPool) -> int:
    block = pool.allocate()
    assert block is not None
    return block


def offered(pool: BlockPool, block_hash: bytes) -> int:
    """A block that is idle: nobody holds it, but it can be found."""
    block = take(pool)
    assert pool.remember(block, block_hash)
    pool.release(block)
    return block


def test_every_block_is_handed_out_once_and_then_none() -> None:
    pool = BlockPool(4)
    assert sorted(take(pool) for _ in range(4)) == [0, 1, 2, 3]
    assert pool.allocate() is None
    assert (pool.num_free, pool.num_held) == (0, 4)


def test_a_block_comes_back_when_its_last_holder_lets_go() -> None:
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


def test_unknown_blocks_are_used_before_known_ones_are_given_up() -> None:
    pool = BlockPool(3)
    known = offered(pool, b"a")
    assert known not in (take(pool), take(pool))
    assert pool.lookup(b"a") == known
    assert pool.allocate() == known
    assert pool.lookup(b"a") is None


def test_the_least_recently_used_block_is_given_up_first() -> None:
    pool = BlockPool(3)
    blocks = [offered(pool, name) for name in (b"a", b"b", b"c")]
    pool.retain(blocks[0])  # used again: now the most recent
    pool.release(blocks[0])
    assert [take(pool) for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_an_idle_block_is_revived_with_its_contents() -> None:
    pool = BlockPool(2)
    block = offered(pool, b"a")
    pool.retain(block)
    assert pool.num_held == 1
    assert pool.lookup(b"a") == block
    pool.release(block)
    assert pool.lookup(b"a") == block


def test_contents_are_known_by_one_block_only() -> None:
    pool = BlockPool(2)
    first, second = take(pool), take(pool)
    assert pool.remember(first, b"a")
    assert not pool.remember(second, b"a")
    assert not pool.remember(first, b"b"), "a block's contents do not change"
    assert pool.lookup(b"a") == first
    assert pool.lookup(b"b") is None
    assert pool.num_known == 1


def test_what_nobody_holds_cannot_be_remembered() -> None:
    with pytest.raises(AssertionError, match="held by nobody"):
        BlockPool(1).remember(0, b"a")


def test_only_an_unshared_unknown_block_is_written_to() -> None:
    pool = BlockPool(2)
    block = take(pool)
    assert pool.is_writable(block)
    pool.retain(block)
    assert not pool.is_writable(block), "shared"
    pool.release(block)
    pool.remember(block, b"a")
    assert not pool.is_writable(block), "known"


def test_a_forgotten_block_is_not_found_and_stays_with_its_holder() -> None:
    pool = BlockPool(2)
    block = take(pool)
    pool.remember(block, b"a")
    pool.forget(block)
    assert pool.lookup(b"a") is None
    assert not pool.is_free(block)
    assert pool.is_writable(block)


def test_a_forgotten_idle_block_is_vacant_and_used_first() -> None:
    pool = BlockPool(2)
    first, second = offered(pool, b"a"), offered(pool, b"b")
    pool.forget(second)
    assert pool.num_free == 2
    assert take(pool) == second
    assert pool.lookup(b"a") == first


def test_forgetting_an_unknown_block_does_nothing() -> None:
    pool = BlockPool(2)
    pool.forget(take(pool))
    assert pool.num_held == 1


def test_all_can_be_forgotten() -> None:
    pool = BlockPool(3)
    offered(pool, b"a")
    held = take(pool)
    pool.remember(held, b"b")
    pool.forget_all()
    assert pool.num_known == 0
    assert (pool.num_free, pool.num_held) == (2, 1)
    pool.check_integrity([[held]])


# ---- corruption is found


def miscount(pool: BlockPool) -> None:
    pool._references[pool_held(pool)] += 1


def lose_a_vacant_block(pool: BlockPool) -> None:
    pool._vacant.pop()


def free_a_held_block(pool: BlockPool) -> None:
    pool._vacant.append(pool_held(pool))


def free_a_block_twice(pool: BlockPool) -> None:
    pool._vacant.append(pool._vacant[-1])


def make_a_block_both_vacant_and_idle(pool: BlockPool) -> None:
    pool._idle[pool._vacant[-1]] = None


def know_a_vacant_block(pool: BlockPool) -> None:
    pool._hash_of[pool._vacant[-1]] = b"x"


def forget_an_idle_block_by_half(pool: BlockPool) -> None:
    (block,) = pool._idle
    del pool._block_of[pool._hash_of.pop(block)]


def find_another_block_than_is_known(pool: BlockPool) -> None:
    pool._block_of[b"a"] = pool_held(pool)


def find_a_block_that_is_not_known(pool: BlockPool) -> None:
    pool._block_of[b"z"] = pool_held(pool)


def pool_held(pool: BlockPool) -> int:
    return next(block for block in range(pool.num_blocks) if not pool.is_free(block))


@pytest.mark.parametrize(
    "corrupt",
    [
        miscount,
        lose_a_vacant_block,
        free_a_held_block,
        free_a_block_twice,
        make_a_block_both_vacant_and_idle,
        know_a_vacant_block,
        forget_an_idle_block_by_half,
        find_another_block_than_is_known,
        find_a_block_that_is_not_known,
    ],
)
def test_the_check_finds(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(5)
    offered(pool, b"a")
    tables = [[take(pool), take(pool)]]
    pool.check_integrity(tables)
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_the_check_finds_a_table_the_pool_does_not_know_of() -> None:
    pool = BlockPool(2)
    block = take(pool)
    for tables in ([], [[block], [block]], [[block, 1 - block]]):
        with pytest.raises(AssertionError, match="holders"):
            pool.check_integrity(tables)


# ---- against a simple model


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a model that keeps holders, contents and order of use in full."""

    @initialize(num_blocks=st.integers(1, 6))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[int] = []  # one entry for each hold
        self.content: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    @rule()
    def allocate(self) -> None:
        free = set(range(self.pool.num_blocks)) - set(self.holders)
        block = self.pool.allocate()
        if block is None:
            assert not free
            return
        assert block in free
        if free - self.idle.keys():
            assert block not in self.idle, "gave up a known block with vacant ones left"
        else:
            assert block == next(iter(self.idle)), "not the least recently used"
        self.idle.pop(block, None)
        self.content.pop(block, None)
        self.holders.append(block)

    @rule(data=st.data())
    @precondition(lambda self: self.holders or self.idle)
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.holders, *self.idle})))
        self.pool.retain(block)
        self.idle.pop(block, None)
        self.holders.append(block)

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.release(block)
        self.holders.remove(block)
        if block not in self.holders and block in self.content:
            self.idle[block] = None

    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    @precondition(lambda self: self.holders)
    def remember(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        is_new = block not in self.content and name not in self.content.values()
        assert self.pool.remember(block, name) is is_new
        if is_new:
            self.content[block] = name

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.forget(block)
        self.content.pop(block, None)
        self.idle.pop(block, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity([self.holders])
        assert pool.num_held == len(set(self.holders))
        assert pool.num_known == len(self.content)
        for name in (b"a", b"b", b"c", b"d"):
            found = [block for block, known in self.content.items() if known == name]
            assert pool.lookup(name) == (found[0] if found else None)
        for block in range(pool.num_blocks):
            alone = self.holders.count(block) == 1 and block not in self.content
            assert pool.is_writable(block) == alone


TestPoolAgainstItsModel = PoolMachine.TestCase
TestPoolAgainstItsModel.settings = settings(max_examples=100, stateful_step_count=40)
