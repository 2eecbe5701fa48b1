"""A server whose answers are written down: the page over whatever chunks a test wants to see."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.server.servers import wait_until

from quire.server.page import page_routes

Delta = Mapping[str, Any]


class Canned:
    """Where it is, what it answers, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.deltas: Sequence[Delta] = ()
        self.asked: list[Any] = []

    async def chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> Any:
        yield ": a comment\n\n"
        for delta in self.deltas:
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            yield f"data: {json.dumps(chunk)}\n\n"
        usage = {"prompt_tokens": 3, "completion_tokens": len(self.deltas)}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\r\n\r\ndata: [DONE]\n\n"


def _models(_: Request) -> Response:
    return JSONResponse({"data": [{"id": "canned"}]})


def _stats(_: Request) -> Response:
    error = {"message": "no figures here", "code": "none"}
    return JSONResponse({"error": error}, status_code=404)


@contextmanager
def canned_server() -> Iterator[Canned]:
    canned = Canned()
    routes = [
        *page_routes(),
        Route("/v1/models", _models),
        Route("/v1/stats", _stats),
        Route("/v1/chat/completions", canned.chat, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    [socket] = server.servers[0].sockets
    canned.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        yield canned
    finally:
        server.should_exit = True
        thread.join()
