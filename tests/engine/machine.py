"""A state machine that does everything to an engine at once and compares each request with its
solo run: the strongest test of the promise that a request's tokens do not depend on its company.
"""

from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.simulated import END_TOKEN, solo, tokens_of

from quire.core.config import EngineConfig
from quire.core.errors import OverloadedError
from quire.core.request import BACKGROUND, Ended, Piece, Request, RequestOutput, Status
from quire.core.sampling import SamplingParams
from quire.core.windows import NO_WINDOWS, Window, Windows, peak_blocks
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, Faults

VOCABULARY = 50  # small: stop tokens come up, and prompts share prefixes
SHARED = tuple(i % VOCABULARY for i in range(100, 200))

prompts = st.builds(
    lambda shared, own: SHARED[:shared] + tuple(own),
    st.sampled_from([0, 4, 8, 9, 16, 25]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14),
    min_tokens=st.just(0) | st.just(1),
    temperature=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    seed=st.integers(0, 5),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None, None, 1]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
configs = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(3, 8),
        "max_step_tokens": st.integers(8, 24),
        "fairness": st.booleans(),
        "prefix_reuse": st.booleans(),
        "chunking": st.booleans(),
        "plan_ahead": st.booleans(),
        "batch_timeout_ms": st.sampled_from([0.0, 30.0]),
        "slo_itl_ms": st.sampled_from([None, None, 12.0]),
        "max_queue_requests": st.just(12),
    }
)
pools = st.fixed_dictionaries(
    {"block_size": st.sampled_from([2, 4, 8]), "num_tokens": st.integers(56, 160)}
)
groups = st.sampled_from(
    [
        NO_WINDOWS,
        (None, Window(5), Window(5)),
        (None, Window(9), Window(8, is_chunked=True)),
        (Window(6),),
    ]
)
state_slots = st.sampled_from([12, 14, 20, 40])  # few bound the batch, to 3 sequences at least


class EngineMachine(RuleBasedStateMachine):
    """Random joins, cancels, deadlines, pauses, faults, pre-emptions, chunks, hits and pools."""

    @initialize(config=configs, pool=pools, windows=groups, num_states=st.just(0) | state_slots)
    def begin(
        self, config: dict[str, Any], pool: dict[str, int], windows: Windows, num_states: int = 0
    ) -> None:
        settings = EngineConfig(**config, step_timeout_s=1.0, step_grace_s=1.0)
        self.windows = windows
        self.faulty: dict[str, set[int]] = {kind: set() for kind in ("nan", "raises", "no_memory")}
        self.hanging: set[int] = set()
        self.executor = FakeExecutor(
            block_size=pool["block_size"],
            num_blocks=peak_blocks(windows, **pool, chunk=settings.smallest_chunk),
            vocabulary_size=VOCABULARY,
            max_context=64,
            windows=windows,
            num_states=num_states,
            faults=Faults(
                nan=self._is_poisoned("nan"),
                raises=self._is_poisoned("raises"),
                no_memory=self._is_poisoned("no_memory"),
                hangs=lambda row: row.sequence_id in self.hanging,
            ),
        )
        self.engine = Engine(
            self.executor,
            settings,
            clock=self.executor.clock,
            end_token_ids=[END_TOKEN],
        )
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.pieces: dict[str, dict[int, list[int]]] = {}
        self.harmed: set[str] = set()

    def _is_poisoned(self, kind: str) -> Any:
        return lambda row: row.sequence_id in self.faulty[kind]

    # ---- what can happen

    @rule(prompt=prompts, params=sampling, key=st.sampled_from("abc"), urgent=st.booleans())
    def join(self, prompt: tuple[int, ...], params: SamplingParams, key: str, urgent: bool) -> None:
        self._join(prompt, params, key, -1 if urgent else 0, None)

    @rule(prompt=prompts, params=sampling, timeout_s=st.sampled_from([0.02, 0.1, 0.5]))
    def join_with_deadline(
        self, prompt: tuple[int, ...], params: SamplingParams, timeout_s: float
    ) -> None:
        self._join(prompt, params, "a", 0, timeout_s)

    @rule(prompt=prompts, params=sampling, key=st.sampled_from("ab"))
    def join_in_background(self, prompt: tuple[int, ...], params: SamplingParams, key: str) -> None:
        self._join(prompt, params, key, BACKGROUND, None)

    def _join(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        key: str,
        priority: int,
        timeout_s: float | None,
    ) -> None:
        try:
            request = self.engine.add_request(
                prompt, params, key=key, priority=priority, timeout_s=timeout_s, stream=True
            )
        except OverloadedError:
            return
        self.requests[request.id] = request
        self.pieces[request.id] = {}

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        self._steps(num_steps)

    @rule(num_steps=st.integers(3, 12))
    def run_on(self, num_steps: int) -> None:
        self._steps(num_steps)

    def _steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()
            self.engine.check_integrity()

    @rule(data=st.data(), kind=st.sampled_from(["cancel", "nan", "raises", "no_memory", "hangs"]))
    @precondition(lambda self: self._live())
    def strike(self, data: st.DataObject, kind: str) -> None:
        """Cancel a request, or make every step it is in fail from now on."""
        request_id = data.draw(st.sampled_from(self._live()))
        if kind == "cancel":
            assert self.engine.cancel(request_id)
            return
        sequences = self.engine._lifecycle.live[request_id].sequences
        target = self.hanging if kind == "hangs" else self.faulty[kind]
        target.update(sequence.id for sequence in sequences if not sequence.is_done)
        self.harmed.add(request_id)

    @rule(data=st.data(), resume=st.booleans())
    @precondition(lambda self: self._live())
    def pause_or_resume(self, data: st.DataObject, resume: bool) -> None:
        request_id = data.draw(st.sampled_from(self._live()))
        (self.engine.resume if resume else self.engine.pause)(request_id)

    @rule(limit=st.sampled_from([None, None, 2, 6]))
    def change_memory(self, limit: int | None) -> None:
        self.executor.faults.no_memory_above = limit

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.3]))
    def let_time_pass(self, seconds: float) -> None:
        self.executor.clock.sleep(seconds)

    # ---- what must hold

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def _live(self) -> list[str]:
        """Requests that have not ended, whether or not their last event was taken."""
        return list(self.engine._lifecycle.live)

    def _step(self) -> None:
        for event in self.engine.step():
            request_id = event.request_id
            assert request_id not in self.outputs, "an event after the end"
            if isinstance(event, Piece):
                own = self.pieces[request_id].setdefault(event.completion_index, [])
                own.extend(event.token_ids)
            elif isinstance(event, Ended):
                self.outputs[request_id] = event.output
                self._compare(request_id, event.output)

    def _compare(self, request_id: str, output: RequestOutput) -> None:
        request = self.requests[request_id]
        expected = solo(
            request.prompt,
            request.params,
            vocabulary_size=VOCABULARY,
            windows=self.windows,
            keeps_states=self.executor.num_states > 0,
        )
        got = tokens_of(output)
        note(f"{request_id}: {output.status}, {got}, expected {expected}")
        for index, tokens in enumerate(got):
            assert tokens == expected[index][: len(tokens)], "tokens depend on company"
            assert self.pieces[request_id].get(index, []) == tokens, "pieces do not add up"
        if output.status is Status.FINISHED:
            assert got == expected, "a finished request is incomplete"
            if request.params.prompt_logprobs is not None:
                assert output.prompt_logprobs is not None
                scored = [score.token for score in output.prompt_logprobs]
                assert scored == list(request.prompt[1:])
        elif output.status is Status.FAILED:
            starved = self.executor.faults.no_memory_above is not None
            assert request_id in self.harmed or starved, f"failed for nothing: {output.error}"

    def teardown(self) -> None:
        """Let everything finish: each request ends, and no block stays behind."""
        if not hasattr(self, "engine"):
            return
        self.executor.faults.no_memory_above = None
        for request_id in self._live():
            self.engine.resume(request_id)
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._step()
            self.engine.check_integrity()
            self.engine.sleep_until_due()
        assert not self.engine.has_work, "the engine does not come to rest"
        assert self.outputs.keys() == self.requests.keys(), "a request never ended"
        assert self.engine.snapshot().kv_usage == 0.0, "a block leaked"
        assert self.engine.cache.state_pool.num_used == 0, "a state leaked"


def machine_with(num_states: st.SearchStrategy[int]) -> type[EngineMachine]:
    """The same with so many slots for states."""

    class Machine(EngineMachine):
        @initialize(config=configs, pool=pools, windows=groups, num_states=num_states)
        def begin(
            self, config: dict[str, Any], pool: dict[str, int], windows: Windows, num_states: int
        ) -> None:
            super().begin(config, pool, windows, num_states)

    return Machine
