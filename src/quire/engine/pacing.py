"""Pacing: predicts how long steps take, sizes them so that latency targets hold, and delays a batch
while more requests are expected."""

import math
from collections import deque
from collections.abc import Callable, Iterable

from quire.core.config import EngineConfig

_FORGETTING = 0.995  # weight of older steps: half after 140 steps
_MARGIN = 0.96  # of a target that steps are planned for
SMALLEST_CHUNK = 16  # tokens of a prompt in a step, however slow the steps
_FIRST_BUDGET = 64  # tokens of a step before any was observed
_LATENCY_BOUND_S = 0.015  # for a step with protected decodes: 66 tokens/s, above reading speed
_LATENCY_BOUND_GROWTH = 2.0  # or so many times what these decodes would take alone
_MIN_CO_SCHEDULED_TOKENS = 8  # in a step with protected decodes, however slow the steps
_BACKGROUND_BOUND_S = 0.004  # for a step with background rows, which an arrival waits for ...
_BACKGROUND_GROWTH = 1.25  # ... or so many times the step without them, if that is longer ...
_BACKGROUND_SHARE = 0.2  # ... or such a part of the time that a usual prompt takes, ...
_BESIDE_DECODES = 0.15  # ... beside others' decodes such a part more than these take alone, ...
_GIVING_WAY_SHARE = 0.5  # ... or such a part where the step gives way to an arrival
_BESIDE_PROMPTS = 1.05  # how much longer the background may make a step with prompts
_MAX_LOST_SHARE = 1 / 16  # of the time of steps that give way, what they may lose to arrivals
_MAX_LOST_S = 0.25  # that they may lose at once, if they lost nothing for long
_FIRST_PROMPT = 256.0  # tokens of a usual prompt, before any came
_PROMPT_MEMORY = 16  # prompts that the usual length is a mean of
_MIN_OBSERVED_STEPS = 8  # before predictions bound anything
_SCALES = (1.0, 1 / 64, 1 / 4096)  # bring 1, tokens and context to one order of magnitude
_NUM_ARRIVALS = 8  # that the mean gap is taken of
_MAX_GAPS = 3.0  # an arrival this many mean gaps late is not expected any more
_MAX_SHARE_IN_VAIN = 1 / 64  # of the time that may go into delays that bring nobody
_MAX_DOUBLINGS = 10  # of the time between two such delays


class StepTimeModel:
    """Step time as a + b·tokens + c·context, by recursive least squares.

    `context` is the number of positions that the step's rows attend to, each row once. Predictions
    are made of cached positions, before the step adds its own.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[1e6 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.num_observed = 0
        self.largest_step = 0  # tokens

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        x = _features(tokens, context)
        p = self._covariance
        px = [sum(p[i][j] * x[j] for j in range(3)) for i in range(3)]
        gain_scale = _FORGETTING + sum(x[i] * px[i] for i in range(3))
        error = seconds - self.predict(tokens, context)
        for i in range(3):
            gain = px[i] / gain_scale
            self._weights[i] += gain * error
            for j in range(3):
                p[i][j] = (p[i][j] - gain * px[j]) / _FORGETTING
        self._bound_covariance()
        self.num_observed += 1
        self.largest_step = max(self.largest_step, tokens)

    def _bound_covariance(self) -> None:
        """Equal steps inform one direction alone: in the others forgetting would never end."""
        largest = max(self._covariance[i][i] for i in range(3))
        if largest > 1e6:
            self._covariance = [[v * 1e6 / largest for v in row] for row in self._covariance]

    def predict(self, tokens: int, context: int) -> float:
        x = _features(tokens, context)
        return sum(w * v for w, v in zip(self._weights, x, strict=True))

    @property
    def seconds_per_token(self) -> float:
        return max(0.0, self._weights[1] * _SCALES[1])

    @property
    def tokens_per_position(self) -> float:
        """The time of a position of context, in tokens."""
        per_token = self.seconds_per_token
        return max(0.0, self._weights[2] * _SCALES[2]) / per_token if per_token else 0.0

    def tokens_within(self, seconds: float, context: int) -> int:
        """How many tokens a step over this context can take in the time."""
        spare = seconds - self.predict(0, context)
        if self.seconds_per_token <= 0.0:
            return self.largest_step if spare > 0 else 0
        return int(spare / self.seconds_per_token)


def _features(tokens: int, context: int) -> tuple[float, float, float]:
    return _SCALES[0], tokens * _SCALES[1], context * _SCALES[2]


class Pacer:
    """Turns the targets into a token budget for the step and a bound on the batch.

    A step is as long as the inter-token target allows. A target for the first token bounds it as
    well: an arrival waits for the step in flight and is computed in the next, so half of it.
    """

    def __init__(self, config: EngineConfig, model: StepTimeModel) -> None:
        targets = []
        if config.slo_itl_ms is not None:
            targets.append(config.slo_itl_ms / 1000)
        if config.slo_ttft_ms is not None:
            targets.append(config.slo_ttft_ms / 2000)
        self._target_s = _MARGIN * min(targets) if targets else None
        self._max_step_tokens = config.max_step_tokens
        self._model = model
        self._usual_prompt = _FIRST_PROMPT
        self._steps_give_way = not config.plan_ahead

    def prompt_admitted(self, num_tokens: int) -> None:
        """A prompt that is not in the background lacks so many tokens."""
        self._usual_prompt += (num_tokens - self._usual_prompt) / _PROMPT_MEMORY

    @property
    def has_target(self) -> bool:
        return self._target_s is not None

    def step_tokens(self, num_decodes: int, context: int) -> int:
        """Tokens the next step may hold, among them `num_decodes` decodes over `context` cached
        positions."""
        if self._target_s is None:
            return self._max_step_tokens
        within = self._model.tokens_within(self._target_s, context)
        grown = max(_FIRST_BUDGET, 2 * self._model.largest_step)
        budget = max(min(within, grown), num_decodes + SMALLEST_CHUNK)
        return min(budget, self._max_step_tokens)

    def co_scheduled_tokens(
        self, num_decodes: int, context: int, contexts: Iterable[int], *, scale: float = 1.0
    ) -> int:
        """Tokens of other keys in a step with a key's protected decodes, so that it takes at most
        `scale` times their latency bound.

        `context`: of all these decodes; `contexts`: of the others' rows, in the order in which they
        get their tokens.
        """
        alone_s = self._known_s(num_decodes, context)
        if alone_s is None:
            return self._max_step_tokens
        bound_s = scale * max(_LATENCY_BOUND_S, _LATENCY_BOUND_GROWTH * alone_s)
        within = self._tokens_beside(num_decodes, context, contexts, bound_s)
        return max(_MIN_CO_SCHEDULED_TOKENS, within)

    def background_tokens(
        self, num_tokens: int, context: int, contexts: Iterable[int], *, has_prompts: bool
    ) -> int:
        """Tokens of the background in a step beside `num_tokens` of others over `context`.

        With prompts of others there may be none: their first tokens wait for this step. Else there
        are a few, however slow the steps. An arrival waits for the end of a step that others have
        rows in, so it is bounded by what the arrival takes itself; one of the background alone
        gives way to it (`Engine.arrival_waits`), unless another is planned ahead.
        """
        alone_s = self._known_s(max(1, num_tokens), context)
        if alone_s is None:
            return 0 if has_prompts else _FIRST_BUDGET
        bound_s = self._background_bound_s(
            alone_s, has_prompts=has_prompts, is_alone=not num_tokens
        )
        if self._target_s is not None:
            bound_s = min(bound_s, self._target_s)
        within = self._tokens_beside(num_tokens, context, contexts, bound_s)
        return max(0 if has_prompts else _MIN_CO_SCHEDULED_TOKENS, within)

    def _background_bound_s(self, alone_s: float, *, has_prompts: bool, is_alone: bool) -> float:
        """How long a step with rows of the background may take; without them it took `alone_s`."""
        if has_prompts:
            return _BESIDE_PROMPTS * alone_s
        usual_s = self._model.predict(int(self._usual_prompt), 0)  # of an arrival's prompt
        share = _GIVING_WAY_SHARE if self._steps_give_way else _BACKGROUND_SHARE
        own_s = share * usual_s if is_alone else alone_s + _BESIDE_DECODES * usual_s
        return max(_BACKGROUND_BOUND_S, _BACKGROUND_GROWTH * alone_s, own_s)

    def _known_s(self, num_tokens: int, context: int) -> float | None:
        """How long a step takes; None where too few were observed to know."""
        model = self._model
        seconds = model.predict(num_tokens, context)
        is_unknown = model.num_observed < _MIN_OBSERVED_STEPS or not model.seconds_per_token
        return None if is_unknown or seconds <= 0 else seconds

    def _tokens_beside(
        self, num_tokens: int, context: int, contexts: Iterable[int], bound_s: float
    ) -> int:
        """Further tokens of a step with so many over `context`, within a time: of rows with these
        contexts, in the order in which they get their tokens."""
        model = self._model
        spare = model.tokens_within(bound_s, context) - num_tokens
        row_costs = 0.0  # of the rows' contexts, in tokens
        for count, length in enumerate(contexts):
            row_cost = model.tokens_per_position * length
            if count and count + row_costs + row_cost >= spare:
                break  # the first makes progress, however long its context
            row_costs += row_cost
        return int(spare - row_costs)

    def row_tokens(self, context: int) -> int:
        """What a row's context takes from the step's budget, in tokens."""
        if self._target_s is None:
            return 0
        return int(context * self._model.tokens_per_position)

    def admits(self, num_running: int, context: Callable[[], int]) -> bool:
        """Whether a batch of so many sequences with so much context, which is asked for where it
        matters, decodes within the target."""
        if self._target_s is None or num_running <= 1:
            return True
        return self._model.predict(num_running, context()) <= self._target_s


class LostTime:
    """Bounds what steps of the background lose to arrivals, whatever the rate of these: a share of
    the time that they took."""

    def __init__(self) -> None:
        self._left_s = _MAX_LOST_S

    @property
    def is_left(self) -> bool:
        return self._left_s > 0

    def ran(self, seconds: float) -> None:
        """A step of the background alone ran to its end."""
        self._left_s = min(_MAX_LOST_S, self._left_s + _MAX_LOST_SHARE * seconds)

    def lost(self, seconds: float) -> None:
        """One was cancelled after so long."""
        self._left_s -= seconds


class BatchingDelay:
    """Whether an idle engine should delay a batch: predicts the next arrival from recent ones.

    A delay pays only while the gaps between arrivals are shorter than the timeout, and while some
    that are expected have not come. How many are expected is learned: a delay that ran out came to
    what can be had by waiting, so a caller that sends one request after another waits once; an
    arrival that finds more requests than that shows that there are others again. As others may
    come without ever meeting, a longer delay is tried now and then, more rarely each time that it
    is in vain.
    """

    def __init__(self, batch_timeout_s: float) -> None:
        self._timeout_s = batch_timeout_s
        self._arrivals: deque[float] = deque(maxlen=_NUM_ARRIVALS)
        self._expected = math.inf  # sequences that a batch may come to by waiting
        self._delayed: float | None = None  # the oldest arrival of the batch that is being delayed
        self._expected_before = 1.0  # when that delay began
        self._num_in_vain = 0  # delays in a row that brought no more than were expected
        self._next_trial = 0.0  # when a batch may wait for more than are expected

    def arrived(self, now: float, num_live: int) -> None:
        """A request came; `num_live` sequences run or wait now, its own included."""
        if self._arrivals and now - self._arrivals[-1] > self._timeout_s * _MAX_GAPS:
            self._arrivals.clear()  # older gaps predict nothing after a pause
        self._arrivals.append(now)
        self._expected = max(self._expected, num_live)

    def wait_until(self, now: float, oldest_arrival: float, num_waiting: int) -> float | None:
        """Until when to delay the batch of those that wait, or None to start now."""
        are_all_here = num_waiting >= self._expected and now < self._next_trial
        if are_all_here or len(self._arrivals) < 2:
            return None
        gap = (self._arrivals[-1] - self._arrivals[0]) / (len(self._arrivals) - 1)
        if gap > self._timeout_s:
            return None
        deadline = min(oldest_arrival + self._timeout_s, self._arrivals[-1] + _MAX_GAPS * gap)
        if deadline > now:
            if self._delayed != oldest_arrival:
                self._delayed = oldest_arrival
                self._expected_before = 1 if self._expected == math.inf else self._expected
            return deadline
        if self._delayed == oldest_arrival:
            # The engine may look late, after a pause of the process: that is no price of waiting.
            waited_s = min(now - oldest_arrival, self._timeout_s)
            self._ran_out(now, waited_s, num_waiting)
        return None

    def _ran_out(self, now: float, waited_s: float, came_to: int) -> None:
        """A delay came to so many, and then nobody else came."""
        is_in_vain = came_to <= self._expected_before
        self._num_in_vain = self._num_in_vain + 1 if is_in_vain else 0
        self._expected = came_to
        pause_s = waited_s / _MAX_SHARE_IN_VAIN
        self._next_trial = now + pause_s * 2.0 ** min(self._num_in_vain, _MAX_DOUBLINGS)
