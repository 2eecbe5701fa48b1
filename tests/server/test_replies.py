"""Replies: what is written of log-probabilities where two tokens have one text."""

import json
from typing import Any

from quire.core.plan import TokenLogprob
from quire.server.replies import LogprobWriter


class SameText:
    """A tokenizer whose tokens below 10 all read alike."""

    def token_text(self, token: int) -> str:
        return "\ufffd" if token < 10 else "b"


def test_of_tokens_with_one_text_the_likeliest_is_written() -> None:
    tokenizer: Any = SameText()
    likeliest = ((3, -0.5), (11, -1.5), (4, -2.5))
    written = LogprobWriter(tokenizer).for_text([TokenLogprob(3, -0.5, 1, likeliest)])
    assert json.loads(written.json)["top_logprobs"] == [{"\ufffd": -0.5, "b": -1.5}]
