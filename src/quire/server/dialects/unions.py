"""Fields that are one of several kinds, chosen before anything is checked: an error is about the
kind that was meant. Tags are no identifiers, so that they are left out of a field's name."""

from collections.abc import Sequence
from typing import Any

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire.server.fields import UNSUPPORTED

TEXT = Tag("as text")
LIST = Tag("as list")


class ByField:
    """Chooses by the value of a field, whose tags are "what value"; `or_text`: text is TEXT. A kind
    that there is not is refused by its name."""

    def __init__(
        self,
        name: str,
        what: str,
        kinds: Sequence[str],
        why: str,
        default: str | None = None,
        *,
        or_text: bool = False,
    ) -> None:
        self._name = name
        self._what = what
        self._kinds = kinds
        self._why = why
        self._default = default
        self._or_text = or_text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        by_tag = Discriminator(
            self._tag,
            custom_error_type=self._what,
            custom_error_message=f"must be an object with a {self._name}: {self._listed}",
        )
        schema = by_tag.__get_pydantic_core_schema__(source, handler)
        return core_schema.no_info_before_validator_function(self._check, schema)

    @property
    def _listed(self) -> str:
        *first, last = self._kinds
        return f"{', '.join(first)} or {last}" if first else last

    def _tag(self, given: Any) -> str | None:
        if self._or_text and isinstance(given, str):
            return TEXT.tag
        kind = self._kind(given)
        return f"{self._what} {kind}" if isinstance(kind, str) else None

    def _kind(self, given: Any) -> Any:
        kind = given.get(self._name) if isinstance(given, dict) else None
        return self._default if kind is None and isinstance(given, dict) else kind

    def _check(self, given: Any) -> Any:
        kind = self._kind(given)
        if not isinstance(kind, str) or kind in self._kinds:
            return given
        sound = kind[:64].encode("utf-8", "replace").decode()
        words = f'has the {self._name} "{sound}", which is not supported here; there is '
        raise PydanticCustomError(
            UNSUPPORTED, "{words}", {"words": f"{words}{self._listed}: {self._why}"}
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
