"""ObjectScanner: finds the end of a JSON object in text that comes in pieces."""

from quire.chat.call_syntax import strict_json


class ObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces, and where the values of its own
    keys are. It checks nothing else."""

    def __init__(self, *, call_name: str | None = None, is_bare: bool = False) -> None:
        self.call_name = call_name  # of a call whose arguments it scans
        self.is_bare = is_bare  # nothing but its keys says that it is a call
        self.text = ""
        self.values: dict[str, tuple[int, int | None]] = {}  # begin and end of each key's value
        self.num_given = 0  # characters of arguments
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._string: tuple[int, int] | None = None  # the last one at depth 1
        self._key: str | None = None  # whose value comes

    def scan(self, text: str) -> int:
        """Take text up to the object's end; gives how much was taken."""
        start = len(self.text)
        self.text += text
        for at in range(start, len(self.text)):
            self._step(at, self.text[at])
            if self.is_done:
                self.text = self.text[: at + 1]
                return at + 1 - start
        return len(text)

    def _step(self, at: int, letter: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
                if self._depth == 1 and self._string is not None:
                    self._string = (self._string[0], at + 1)
            return
        if letter == '"':
            self._in_string = True
            self._value_begins(at)
            if self._depth == 1:
                self._string = (at, at)
        elif letter in "{[":
            self._value_begins(at)
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._value_ends(at)
                self.is_done = True
            elif self._depth == 1:
                self._value_ends(at + 1)
        elif self._depth == 1 and letter == ":":
            self._take_key()
        elif self._depth == 1 and letter == ",":
            self._value_ends(at)
        elif not letter.isspace():
            self._value_begins(at)

    def _take_key(self) -> None:
        if self._key is None and self._string is not None:
            try:
                self._key = str(strict_json(self.text[slice(*self._string)]))
            except ValueError:
                self._key = ""

    def _value_begins(self, at: int) -> None:
        if self._depth == 1 and self._key is not None and self._key not in self.values:
            self.values[self._key] = (at, None)

    def _value_ends(self, at: int) -> None:
        if self._key is not None:
            begin, end = self.values.get(self._key, (at, None))
            self.values[self._key] = (begin, at if end is None else end)
            self._key = None

    def text_of(self, keys: tuple[str, ...]) -> str | None:
        """The text that the first of these keys has, if its value is a whole text."""
        for key in keys:
            begin, end = self.values.get(key, (0, None))
            if end is not None:
                try:
                    value = strict_json(self.text[begin:end])
                except (ValueError, RecursionError):
                    return None
                return value if isinstance(value, str) else None
        return None

    def span_of(self, keys: tuple[str, ...]) -> tuple[int, int] | None:
        """Where the value of the first of these keys is, as far as it has come."""
        for key in keys:
            if key in self.values:
                begin, end = self.values[key]
                return begin, len(self.text) if end is None else end
        return None
