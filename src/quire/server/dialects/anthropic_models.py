"""The server's models as Anthropic's clients list them: those that name a version of its API."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, Field
from starlette.requests import Request

from quire.server.replies import ModelCard


class MessagesModel(BaseModel):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime = Field(description="when it was loaded")
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = Field(description="the context, which prompt and answer share")
    max_tokens: int | None = Field(description="likewise")


class MessagesModelList(BaseModel):
    """All models: there is one page of them."""

    data: list[MessagesModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def asks_as_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def messages_model(card: ModelCard) -> MessagesModel:
    longest = card.max_model_len
    return MessagesModel(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC),
        max_input_tokens=longest,
        max_tokens=longest,
    )


def messages_models(cards: Sequence[ModelCard]) -> MessagesModelList:
    models = [messages_model(card) for card in cards]
    return MessagesModelList(data=models, first_id=models[0].id, last_id=models[-1].id)
