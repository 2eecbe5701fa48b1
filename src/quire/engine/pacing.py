"""Pacing: learns how long steps take, and sizes them so that the latency targets hold."""

from collections.abc import Iterable

from quire.core.config import EngineConfig

_FORGETTING = 0.995  # older steps count less: half after 140 steps
_MARGIN = 0.96  # plan for a little less than the target
SMALLEST_CHUNK = 16  # prompts go on, however slow the steps
_FIRST_BUDGET = 64  # tokens of a step before anything is known
_BEARABLE_S = 0.015  # between two tokens of a stream: faster than anybody reads
_BEARABLE_GROWTH = 2.0  # or so many times what the streams would take by themselves
_LEAST_BESIDE = 8  # tokens that a key over its share gets, however slow the steps
_KNOWN_AFTER = 8  # steps
_SCALES = (1.0, 1 / 64, 1 / 4096)  # bring 1, tokens and context to one size


class StepTimeModel:
    """Step time as a + b·tokens + c·context, by recursive least squares.

    `context` is the number of cached positions that the step's rows attend to, each row once.
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
        """Steps that are all alike must not wind the uncertainty up without end."""
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
        """What a position of context costs, in tokens."""
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

    @property
    def has_target(self) -> bool:
        return self._target_s is not None

    def step_tokens(self, num_decodes: int, context: int) -> int:
        """Tokens the next step may hold, beside `num_decodes` running ones over `context`."""
        if self._target_s is None:
            return self._max_step_tokens
        within = self._model.tokens_within(self._target_s, context)
        grown = max(_FIRST_BUDGET, 2 * self._model.largest_step)
        budget = max(min(within, grown), num_decodes + SMALLEST_CHUNK)
        return min(budget, self._max_step_tokens)

    def tokens_beside(
        self, num_streams: int, context: int, contexts: Iterable[int], *, times: float = 1.0
    ) -> int:
        """Tokens that others may have in a step with a key's streams, `times` what these bear.

        `context`: of all the streams; `contexts`: of the others' rows, in the order in which they
        get their tokens.
        """
        model = self._model
        alone_s = model.predict(num_streams, context)
        if model.num_observed < _KNOWN_AFTER or not model.seconds_per_token or alone_s <= 0:
            return self._max_step_tokens
        bearable_s = times * max(_BEARABLE_S, _BEARABLE_GROWTH * alone_s)
        spare = model.tokens_within(bearable_s, context) - num_streams
        row_costs = 0.0  # of opening rows over their contexts, in tokens
        for count, length in enumerate(contexts):
            row_cost = model.tokens_per_position * length
            if count and count + row_costs + row_cost >= spare:
                break  # the first goes on, however long its context
            row_costs += row_cost
        return max(_LEAST_BESIDE, int(spare - row_costs))

    def row_tokens(self, context: int) -> int:
        """What opening a row over so much context takes from the step's budget."""
        if self._target_s is None:
            return 0
        return int(context * self._model.tokens_per_position)

    def admits(self, num_running: int, context: int) -> bool:
        """Whether so many sequences, grown to so much context, still decode within the target."""
        if self._target_s is None or num_running <= 1:
            return True
        return self._model.predict(num_running, context) <= self._target_s
