"""Fields that are one of several kinds, chosen before anything is checked: an error is then about the
kind that was meant. Tags are no identifiers: bodies.py leaves them out of a field's name."""

from collections.abc import Sequence
from typing import Any

from pydantic import Discriminator, Tag

TEXT = Tag("as text")
LIST = Tag("as list")


def by_field(
    name: str,
    what: str,
    kinds: Sequence[str],
    why: str,
    default: str | None = None,
    *,
    or_text: bool = False,
) -> Discriminator:
    """Chooses by the value of a field, whose tags are "what value"; `or_text`: text is TEXT."""

    def tag(given: Any) -> str | None:
        if or_text and isinstance(given, str):
            return TEXT.tag
        kind = given.get(name, default) if isinstance(given, dict) else None
        return f"{what} {kind}" if isinstance(kind, str) else None

    listed = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds)
    return Discriminator(
        tag,
        custom_error_type=what,
        custom_error_message=f"must be a {what} whose {name} is {listed}: {why}",
    )


def text_or_list(of_what: str) -> Discriminator:
    """Chooses TEXT or LIST."""

    def tag(given: Any) -> str | None:
        if isinstance(given, str):
            return TEXT.tag
        return LIST.tag if isinstance(given, list) else None

    return Discriminator(
        tag, custom_error_type="kind", custom_error_message=f"must be text or a list of {of_what}"
    )
