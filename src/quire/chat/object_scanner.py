"""ObjectScanner: finds the end of a JSON object in text that comes in pieces."""

from quire.chat.call_syntax import is_text, strict_json


class ObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces, and where the values of its own
    keys are. It checks nothing else."""

    def __init__(self, *, call_name: str | None = None, is_bare: bool = False) -> None:
        self.call_name = call_name  # of a call whose arguments it scans
        self.is_bare = is_bare  # nothing but its keys says that it is a call
        self._parts: list[str] = []  # joined when it is needed: objects may be long
        self._length = 0
        self._names: dict[tuple[str, ...], str] = {}  # that text_of() found
        self.values: dict[str, tuple[int, int | None]] = {}  # begin and end of each key's value
        self.num_given = 0  # characters of arguments
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._string: tuple[int, int] | None = None  # the last one at depth 1
        self._key: str | None = None  # whose value comes

    def scan(self, text: str) -> int:
        """Take text up to the object's end; gives how much was taken."""
        self._parts.append(text)
        start = self._length
        for at, letter in enumerate(text, start):
            self._length = at + 1
            self._step(at, letter)
            if self.is_done:
                self._parts = [self.text[: at + 1]]
                return at + 1 - start
        return len(text)

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def since(self, begin: int, end: int) -> str:
        """The text from `begin` to `end`, which is seldom more than the last piece."""
        last = self._length - len(self._parts[-1])
        if begin >= last:
            return self._parts[-1][begin - last : end - last]
        return self.text[begin:end]

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
        if keys in self._names:
            return self._names[keys]
        for key in keys:
            begin, end = self.values.get(key, (0, None))
            if end is not None:
                try:
                    value = strict_json(self.text[begin:end])
                except (ValueError, RecursionError):
                    return None
                if not isinstance(value, str) or not is_text(value):
                    return None
                self._names[keys] = value
                return value
        return None

    def span_of(self, keys: tuple[str, ...]) -> tuple[int, int] | None:
        """Where the value of the first of these keys is, as far as it has come."""
        for key in keys:
            if key in self.values:
                begin, end = self.values[key]
                return begin, self._length if end is None else end
        return None
