"""Server-sent events as bytes: what every chunk of an answer shares is written once.

Streams make a frame for nearly every token, so a frame is a few joined strings, not a model.
"""

import json
from collections.abc import Sequence

from quire.core.plan import TokenLogprob
from quire.core.request import Piece
from quire.server.replies import TraceReport, Usage
from quire.server.scores import ScoreWriter

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Frames:
    """The chunks of one answer; subclasses write the part that differs between the APIs."""

    kind: str

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        scores: ScoreWriter,
        *,
        with_usage: bool,
        with_token_ids: bool,
    ) -> None:
        shared = {
            "id": answer_id,
            "object": self.kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = "data: " + json.dumps(shared)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}\n\n' if with_usage else "]}\n\n"
        self._scores = scores
        self._with_usage = with_usage
        self._with_token_ids = with_token_ids
        self._num_spelled: dict[int, int] = {}  # characters of each choice's tokens so far

    def opening(self, _index: int) -> bytes:
        """What comes before a choice's first text, if anything."""
        return b""

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        """A choice up to, and without, its finish reason."""
        raise NotImplementedError

    def chunk(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """One chunk of all these pieces of a choice; nothing where they hold nothing yet."""
        reason = pieces[-1].finish_reason
        text = "".join([piece.text for piece in pieces])
        scores = [score for piece in pieces for score in piece.logprobs]
        if not text and reason is None and not scores and not self._with_token_ids:
            return b""  # half a character, or what may begin a stop string
        parts = [self._head, self._choice(index, text, scores)]
        if self._with_token_ids:
            token_ids = [token for piece in pieces for token in piece.token_ids]
            parts.append(f', "token_ids": {json.dumps(token_ids)}')
        told = "null" if reason is None else f'"{reason}"'
        parts.append(f', "finish_reason": {told}}}{self._tail}')
        return "".join(parts).encode()

    def ending(self, usage: Usage, traces: Sequence[TraceReport]) -> bytes:
        """The chunk without choices: counts and traces, where they were asked for."""
        if not self._with_usage and not traces:
            return b""
        parts = []
        if self._with_usage:
            parts.append(f'"usage": {usage.model_dump_json()}')
        if traces:
            listed = ", ".join(trace.model_dump_json() for trace in traces)
            parts.append(f'"quire_trace": [{listed}]')
        return f"{self._head}], {', '.join(parts)}}}\n\n".encode()


class ChatFrames(Frames):
    kind = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        choice = f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
        return f'{self._head}{choice}"logprobs": null, "finish_reason": null}}{self._tail}'.encode()

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        told = self._scores.for_chat(scores) if scores else "null"
        delta = f'{{"content": {json.dumps(text)}}}' if text else "{}"
        return f'{{"index": {index}, "delta": {delta}, "logprobs": {told}'


class TextFrames(Frames):
    kind = "text_completion"

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        told = "null"
        if scores:
            offset = self._num_spelled.get(index, 0)
            written = self._scores.for_text(scores, offset)
            self._num_spelled[index] = offset + written.num_characters
            told = written.json
        return f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {told}'
