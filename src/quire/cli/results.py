"""Results as JSON, and as lines for a person."""

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.core.errors import QuireError
    from quire.core.plan import TokenLogprob
    from quire.core.request import Completion, RequestOutput


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()


def error_json(error: "QuireError") -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def output_json(output: "RequestOutput") -> dict[str, Any]:
    """Everything known of a finished request, in JSON's types."""
    metrics = output.metrics
    scores = output.prompt_logprobs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": None if scores is None else list(map(_logprob_json, scores)),
        "completions": [_completion_json(completion) for completion in output.completions],
        "error": None if output.error is None else error_json(output.error),
        "metrics": {
            "queued_s": metrics.queued_s,
            "time_to_first_token_s": metrics.time_to_first_token_s,
            "total_s": metrics.total_s,
            "num_cached_tokens": metrics.num_cached_tokens,
        },
    }


def _completion_json(completion: "Completion") -> dict[str, Any]:
    scores = completion.logprobs
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": None if scores is None else list(map(_logprob_json, scores)),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _logprob_json(score: "TokenLogprob") -> dict[str, Any]:
    return {
        "token": score.token,
        "logprob": score.logprob,
        "rank": score.rank,
        "top": [{"token": token, "logprob": logprob} for token, logprob in score.top],
    }


def printable(line: str) -> str:
    """A line that may come from a file, so that it cannot play tricks on a terminal."""
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in line)


def complain(message: str) -> None:
    """Say what is wrong, in one line on standard error."""
    print(f"quire: {printable(' '.join(message.split()))}", file=sys.stderr)


def tell(line: str) -> None:
    """Say something beside the results, to a person who watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
