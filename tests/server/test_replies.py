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


class Counting(SameText):
    """It counts what it is asked for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.num_asked = 0

    def token_text(self, token: int) -> str:
        self.num_asked += 1
        return self._text * token

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()


def test_a_tokens_text_is_written_once_for_all_streams_of_a_tokenizer() -> None:
    scores = [TokenLogprob(2, -0.5, 1, ((2, -0.5), (3, -1.5)))]
    tokenizers: list[Any] = [Counting('"é'), Counting("b")]
    texts, chats = [], []
    for tokenizer in tokenizers * 3:
        writer = LogprobWriter(tokenizer)
        texts.append(json.loads(writer.for_text(scores, 7).json))
        chats.append(json.loads(writer.for_chat(scores))["content"][0])
        written = json.loads(LogprobWriter(tokenizer, as_ids=True).for_text(scores).json)
        assert written["tokens"] == ["token_id:2"]
    assert [tokenizer.num_asked for tokenizer in tokenizers] == [6, 6]
    assert texts[0] == texts[2] == texts[4] and texts[1] == texts[3]
    assert [found["tokens"] for found in texts[:2]] == [['"é"é'], ["bb"]]
    assert texts[1]["top_logprobs"] == [{"bb": -0.5, "bbb": -1.5}]
    assert texts[1]["text_offset"] == [7]
    assert [found["bytes"] for found in chats[:2]] == [list('"é"é'.encode()), [98, 98]]
