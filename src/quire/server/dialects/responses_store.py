"""ResponseStore: responses that clients can name later, in memory, within bounds, each for its key.

They are kept as JSON text, whose bytes are counted. Where a bound is reached, the key that holds
most loses its oldest response: storing more pushes out one's own.
"""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

Item = dict[str, Any]  # an item of a conversation, as its JSON


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`earlier` and `input` are lists of items: the conversation before, and what followed it."""

    id: str
    earlier: bytes
    input: bytes
    body: bytes  # the response, with the items of its output

    @property
    def num_bytes(self) -> int:
        return len(self.earlier) + len(self.input) + len(self.body)

    def conversation(self) -> list[Item]:
        """What a response that follows begins with."""
        output: list[Item] = json.loads(self.body)["output"]
        return [*json.loads(self.earlier), *json.loads(self.input), *output]


@dataclass(slots=True)
class _Shelf:
    """One key's responses, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Used by the event loop and by the work pool's threads."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()
        self._num_responses = 0
        self._num_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is stored at all."""
        return self._max_responses > 0

    def put(self, key: str, response: StoredResponse) -> None:
        """Keep a response; one that is larger than the whole store is not kept."""
        if not self.is_open or response.num_bytes > self._max_bytes:
            return
        with self._lock:
            shelf = self._shelves.setdefault(key, _Shelf())
            shelf.responses[response.id] = response
            self._count(shelf, 1, response.num_bytes)
            while self._num_responses > self._max_responses or self._num_bytes > self._max_bytes:
                self._drop_oldest()

    def find(self, key: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            shelf = self._shelves.get(key)
            return None if shelf is None else shelf.responses.get(response_id)

    def delete(self, key: str, response_id: str) -> bool:
        """Whether there was one."""
        with self._lock:
            shelf = self._shelves.get(key)
            found = None if shelf is None else shelf.responses.pop(response_id, None)
            if shelf is None or found is None:
                return False
            self._count(shelf, -1, -found.num_bytes)
            if not shelf.responses:
                del self._shelves[key]
            return True

    def _drop_oldest(self) -> None:
        key, shelf = max(self._shelves.items(), key=lambda entry: entry[1].num_bytes)
        _, dropped = shelf.responses.popitem(last=False)
        self._count(shelf, -1, -dropped.num_bytes)
        if not shelf.responses:
            del self._shelves[key]

    def _count(self, shelf: _Shelf, num_responses: int, num_bytes: int) -> None:
        shelf.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._num_responses += num_responses

    def __len__(self) -> int:
        return self._num_responses

    @property
    def num_bytes(self) -> int:
        return self._num_bytes
