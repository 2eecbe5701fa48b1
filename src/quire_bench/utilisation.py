"""How much of what the machine can do a run achieved: bytes and operations against its limits.

What is counted is what the mathematics needs at least: a step reads every matrix once, as the
executor keeps it, and the keys and values of every context; a token takes two operations a weight,
and four a dimension and position of attention. An executor that reads or computes more than that
shows as lower utilisation, as it should.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_bench.machine_limits import RATES
from quire_bench.measure import Run, StepTime
from quire_bench.receipts import (
    Facts,
    GpuLimits,
    Limits,
    Machine,
    Receipt,
    ReceiptError,
    number,
    read,
    read_folder,
    section,
)
from quire_bench.subject import Subject

_MEMORY = RATES["memory_read"]
_FLOAT32 = RATES["float32"]
_FLOAT16 = "float16_operations_per_second"  # what a GPU multiplies with
_INTEGER = RATES["integer"]  # what quantised products compute with; older receipts lack it


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model needs for a token and for a step."""

    weight_bytes: int  # that a step reads
    kv_bytes: int  # of one position
    layer_weights: int
    head_weights: int
    attention_size: int  # numbers of all queries of a token, in all layers

    @classmethod
    def of(cls, subject: Subject) -> "Cost":
        spec, facts = subject.assembly.spec, subject.facts
        packed_bytes = subject.assembly.executor.memory_bytes["weights"]
        head = spec.vocabulary_size * spec.hidden_size
        return cls(
            weight_bytes=round(packed_bytes * facts.matrix_weights / facts.num_weights),
            kv_bytes=subject.assembly.memory.kv_per_token,
            layer_weights=facts.matrix_weights - head,
            head_weights=head,
            attention_size=sum(part.query_size for part in spec.attentions.values()),
        )

    def decode_bytes(self, steps: list[StepTime], context: float) -> float:
        tokens = sum(step.decode_tokens for step in steps)
        return len(steps) * self.weight_bytes + tokens * context * self.kv_bytes

    def decode_operations(self, steps: list[StepTime], context: float) -> float:
        each = 2 * (self.layer_weights + self.head_weights) + 4 * context * self.attention_size
        return sum(step.decode_tokens for step in steps) * each

    def prompt_operations(self, run: Run) -> float:
        """Of the prompts alone: each token through the layers, each request's last to the head."""
        load = run.load
        each = 2 * self.layer_weights + 2 * load.prompt_tokens * self.attention_size
        tokens = sum(step.prompt_tokens for step in run.prompt_steps)
        return tokens * each + load.num_requests * 2 * self.head_weights


def achieved(cost: Cost, run: Run) -> dict[str, float | None]:
    """Bytes and operations a second, of decode steps and of prompt steps."""
    context = run.load.prompt_tokens + run.load.new_tokens / 2  # on average
    decode, prompt = run.decode_steps, run.prompt_steps
    decode_s = sum(step.seconds for step in decode)
    prompt_s = sum(step.seconds for step in prompt)
    return {
        "decode_bytes_per_second": _per(cost.decode_bytes(decode, context), decode_s),
        "decode_operations_per_second": _per(cost.decode_operations(decode, context), decode_s),
        "prompt_operations_per_second": _per(cost.prompt_operations(run), prompt_s),
    }


def shares(
    found: Mapping[str, float | None], limits: Mapping[str, object]
) -> dict[str, float | None]:
    """What was achieved as a share of the limits."""
    pairs = {"decode_memory_share": ("decode_bytes_per_second", _MEMORY)}
    for kind, rate in (("float32", _FLOAT32), ("integer", _INTEGER), ("float16", _FLOAT16)):
        if rate in limits:
            pairs[f"decode_{kind}_share"] = ("decode_operations_per_second", rate)
            pairs[f"prompt_{kind}_share"] = ("prompt_operations_per_second", rate)
    return {
        name: _per(found.get(rate), number(limits, limit)) for name, (rate, limit) in pairs.items()
    }


def limits_of(executor: str, limits: Limits | None) -> Limits | GpuLimits | None:
    """Those of what computes: a GPU's own, or the processor's."""
    if limits is None or executor != "cuda":
        return limits
    return limits.get("gpu")


def _per(amount: float | None, by: float | None) -> float | None:
    return None if amount is None or by is None or by <= 0 else amount / by


def find_limits(given: str | None, folder: Path, machine: Machine, executor: str) -> Limits | None:
    """The limits of a receipt: the one given, else the newest of such a machine in the folder."""
    if given is not None:
        path, receipt = Path(given), read(given)
        if receipt.kind != "limits":
            raise ReceiptError(f"{path} is a receipt of {receipt.kind}, not of limits")
        found = _best(path, receipt)
        if limits_of(executor, found) is None:
            raise ReceiptError(
                f"{path} has no GPU's limits: run `quire bench limits` where the GPU is"
            )
        return found
    known = read_folder(folder, "limits")
    fitting = [path for path in known if _fits(known[path], machine, executor)]
    newest = max(fitting, key=lambda path: (known[path].created, path), default=None)
    return None if newest is None else _best(newest, known[newest])


def _fits(limits: Receipt, machine: Machine, executor: str) -> bool:
    """Whether they are of a machine like this one, of its GPU where that computes."""
    own = limits.machine
    is_same = (own["cpu"], own["cores"]) == (machine["cpu"], machine["cores"])
    if executor != "cuda":
        return is_same
    return is_same and own["gpu"] == machine["gpu"] and "gpu" in limits.results


def utilisation_of(receipt: Receipt, others: Sequence[Receipt]) -> Facts:
    """The shares that a receipt has; where it was measured without limits, what it achieved by the
    newest limits of its machine among the others; empty where there are none."""
    own = section(receipt.results, "utilisation")
    executor = str(receipt.executed["device"])
    known = [
        other
        for other in others
        if other.kind == "limits" and _fits(other, receipt.machine, executor)
    ]
    if own or not known:
        return own
    newest = max(known, key=lambda other: other.created)
    bounds = limits_of(executor, _best(Path("limits"), newest))
    achieved = section(receipt.results, "achieved")
    found = {name: number(achieved, name) for name in achieved}
    return shares(found, bounds or {})


def arithmetic_share(found: Facts, phase: str) -> float | None:
    """Of what the products compute with: integers on a CPU, float16 on a GPU."""
    for kind in ("integer", "float16", "float32"):
        if (share := number(found, f"{phase}_{kind}_share")) is not None:
            return share
    return None


def floor_share(found: Facts) -> float | None:
    """Of the time that a decode step takes, what it needs at least: for its bytes or for its
    operations."""
    both = (number(found, "decode_memory_share"), arithmetic_share(found, "decode"))
    return max((share for share in both if share is not None), default=None)


def _best(path: Path, receipt: Receipt) -> Limits:
    def best(name: str) -> float:
        value = number(receipt.results, name, "best")
        if value is None:
            raise ReceiptError(f"{path}: field 'results.{name}.best' is missing")
        return value

    found: Limits = {
        "receipt": path.name,
        "memory_read_bytes_per_second": best(_MEMORY),
        "float32_operations_per_second": best(_FLOAT32),
    }
    if (integer := number(receipt.results, _INTEGER, "best")) is not None:
        found["integer_operations_per_second"] = integer
    if "gpu" in receipt.results:
        found["gpu"] = _gpu_best(receipt)
    return found


def _gpu_best(receipt: Receipt) -> GpuLimits:
    found: GpuLimits = {}
    if (memory := number(receipt.results, "gpu", _MEMORY)) is not None:
        found["memory_read_bytes_per_second"] = memory
    if (float16 := number(receipt.results, "gpu", _FLOAT16)) is not None:
        found["float16_operations_per_second"] = float16
    return found
