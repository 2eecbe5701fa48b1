"""/v1/files and /v1/batches, as OpenAI's client uses them: each key sees its own."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from quire.server.answers.idempotency import REPLAYED, KeyedCall
from quire.server.calls import SCOPE_KEY, Call, IdSource
from quire.server.database import StoreError
from quire.server.errors import ApiError
from quire.server.fields import Strict
from quire.server.jobs.files import MAX_JOB_LINE_BYTES
from quire.server.jobs.jobs import unavailable
from quire.server.jobs.store import (
    INPUT,
    Batch,
    InUseError,
    JobStore,
    NewBatch,
    Page,
    QuotaError,
    StoredFile,
)
from quire.server.model_service import ModelService
from quire.server.openapi import error_responses, post_error_responses
from quire.server.service import Service

MAX_LISTED = 10_000  # files on one page; of batches a hundred
_MAX_BATCHES_LISTED = 100
_MAX_METADATA = 16  # pairs, as OpenAI has it
_MAX_WINDOW_S = 30 * 86_400
_PART = 1 << 20  # bytes
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_JSON = "application/json"
_KEEP_S = (3600, 30 * 86_400)  # the range of expires_after, as OpenAI has it

T = TypeVar("T")


class FileReply(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchReply(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(Strict):
    anchor: Literal["created_at"] = Field(description="what the seconds are counted from")
    seconds: int = Field(
        ge=_KEEP_S[0], le=_KEEP_S[1], description="after which the output files are deleted"
    )


class CreateBatch(Strict):
    """The body of /v1/batches."""

    input_file_id: str = Field(description="of a file with the purpose batch")
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description="that all lines are for")
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,6}[smhd]$",
        examples=["24h"],
        description="24h, or another time up to 30d; what is not answered by then gets an error",
    )
    metadata: dict[str, str] | None = Field(
        default=None, max_length=_MAX_METADATA, description="kept with the batch"
    )
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="deletes the files of answers so long after they were made"
    )


def _owner(request: Request) -> str:
    call: Call = request.scope[SCOPE_KEY]
    return call.key_name


async def _stored(service: Service, work: Callable[[JobStore], T]) -> T:
    """What the store does, off the event loop; its errors as the API's."""
    store = await service.jobs.store()
    try:
        return await asyncio.to_thread(work, store)
    except StoreError as error:
        raise unavailable(error) from error
    except QuotaError as error:
        raise ApiError(429, str(error), code="insufficient_quota") from error
    except InUseError as error:
        raise ApiError(409, str(error), code="file_in_use") from error


# ---- files


async def _upload(service: Service, request: Request) -> Response:
    call: Call = request.scope[SCOPE_KEY]
    try:
        form = await request.form(max_files=1, max_fields=8)
    except HTTPException as error:
        raise ApiError(400, f"the form cannot be read: {error.detail}", code="form") from error
    try:
        upload = _checked_form(form)
        if call.idempotency_key is None:
            return _json(await _kept_file(service, call, upload))
        digest = await asyncio.to_thread(upload.digest)
        keyed = KeyedCall(service, call, call.idempotency_key, digest)
        async with keyed.claimed(request.receive) as found:
            if found.body is not None:
                call.is_replayed = True
                return Response(found.body, found.status or 200, dict([REPLAYED]), _JSON)
            reply = _json(await _kept_file(service, call, upload))
            await keyed.keep(found, 200, list(reply.headers.items()), bytes(reply.body))
            return reply
    finally:
        await form.close()


async def _kept_file(service: Service, call: Call, upload: "_Upload") -> FileReply:
    owner, name = call.key_name, _name_of(call, "file")

    def add(store: JobStore) -> StoredFile:
        _check_lines(upload.file)
        return store.add_file(owner, upload.name, upload.parts(), upload.keep_s, name)

    return _file(await _stored(service, add))


def _name_of(call: Call, kind: str) -> str | None:
    """The id of what a call makes, where it has to be made once."""
    if call.identity is None:
        return None
    made = IdSource(call.identity).new(kind)
    return made.replace("_", "-", 1) if kind == "file" else made


class _Upload(NamedTuple):
    file: UploadFile
    keep_s: int | None

    @property
    def name(self) -> str:
        return (self.file.filename or "requests.jsonl")[:255]

    def parts(self) -> Iterator[bytes]:
        self.file.file.seek(0)
        while part := self.file.file.read(_PART):
            yield part

    def digest(self) -> str:
        """Of what was uploaded; how a client cuts a form into parts makes no difference."""
        digest = hashlib.sha256(repr((self.name, self.keep_s)).encode(errors="surrogatepass"))
        for part in self.parts():
            digest.update(part)
        return digest.hexdigest()


def _checked_form(form: FormData) -> _Upload:
    known = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
    for name in form:
        if name not in known:
            message = f"unknown field {name!r:.100}; there are {', '.join(known)}"
            raise ApiError(400, message, param=name[:100], code="unknown_field")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "a file is needed", param="file")
    if purpose != INPUT:
        given = "it is missing" if purpose is None else f"got {purpose!r:.100}"
        message = f"purpose must be {INPUT!r}: quire keeps files of requests; {given}"
        raise ApiError(400, message, param="purpose")
    anchor, seconds = (form.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return _Upload(file, None)
    is_number = isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 9
    if anchor != "created_at" or not is_number or not _KEEP_S[0] <= int(str(seconds)) <= _KEEP_S[1]:
        message = f"expires_after takes anchor created_at and seconds from {_KEEP_S[0]} to "
        raise ApiError(400, f"{message}{_KEEP_S[1]}", param="expires_after")
    return _Upload(file, int(str(seconds)))


def _check_lines(file: UploadFile) -> None:
    """JSON objects, one a line; what they ask for is checked with the batch, which names lines."""
    file.file.seek(0)
    number = 0
    is_empty = True
    while line := file.file.readline(MAX_JOB_LINE_BYTES + 1):
        number += 1
        is_empty = is_empty and not line.strip()
        if len(line) > MAX_JOB_LINE_BYTES:
            message = f"line {number} has more than {MAX_JOB_LINE_BYTES} bytes"
            raise ApiError(400, message, param="file", code="invalid_file")
        if line.strip() and not _is_object(line):
            message = f"line {number} is no JSON object; the file has one on every line"
            raise ApiError(400, message, param="file", code="invalid_file")
    if is_empty:
        message = "the file is empty: it has no lines but blank ones"
        raise ApiError(400, message, param="file", code="invalid_file")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _file(file: StoredFile) -> FileReply:
    return FileReply(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


def _no_file(file_id: str, status: int = 404, param: str | None = None) -> ApiError:
    return ApiError(
        status, f"there is no file {file_id!r:.100}", code="file_not_found", param=param
    )


# ---- batches


async def create_batch(model: ModelService, request: Request) -> Response:
    service = model.server
    message = await request.receive()  # the middleware gives it in one piece
    call: Call = request.scope[SCOPE_KEY]
    body = service.read_body(call, message.get("body", b""), CreateBatch)
    window_s = int(body.completion_window[:-1]) * _UNITS[body.completion_window[-1]]
    if window_s > _MAX_WINDOW_S:
        raise ApiError(400, "completion_window may be 30d at most", param="completion_window")
    _check_text("input_file_id", body.input_file_id)
    for text in (part for item in (body.metadata or {}).items() for part in item):
        _check_text("metadata", text)
    keep = body.output_expires_after
    new = NewBatch(
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        window_s,
        body.metadata,
        None if keep is None else keep.seconds,
    )
    owner = call.key_name
    name = _name_of(call, "batch")
    batch = await _stored(service, lambda store: store.add_batch(owner, new, name))
    if batch is None:
        raise _no_file(body.input_file_id, 400, "input_file_id")
    service.jobs.wake()
    return _json(_batch(batch))


def _json(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type=_JSON)


def _check_text(name: str, text: str) -> None:
    """JSON can say halves of surrogate pairs, which no file, database or reply can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{name} has half of a surrogate pair, which is no text"
        raise ApiError(400, message, param=name) from error


def _batch(batch: Batch) -> BatchReply:
    errors = [BatchError(**problem._asdict()) for problem in batch.errors]
    times = {
        name: batch.times.get(name)
        for name in BatchReply.model_fields
        if name.endswith("_at") and name not in ("created_at", "expires_at")
    }
    return BatchReply.model_validate(
        {
            "id": batch.id,
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": BatchErrors(data=errors) if errors else None,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": batch.status,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            **times,
            "request_counts": RequestCounts(
                total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
            ),
            "metadata": batch.metadata,
        }
    )


def _no_batch(batch_id: str) -> ApiError:
    return ApiError(404, f"there is no batch {batch_id!r:.100}", code="batch_not_found")


async def _cancel(service: Service, owner: str, batch_id: str) -> BatchReply:
    def ask(store: JobStore) -> Batch | None:
        store.move(batch_id, "cancelling", "validating", "in_progress")
        return store.batch(owner, batch_id)

    if await _stored(service, lambda store: store.batch(owner, batch_id)) is None:
        raise _no_batch(batch_id)
    batch = await _stored(service, ask)
    assert batch is not None
    if batch.status not in ("cancelling", "cancelled"):
        message = f"{batch_id} is {batch.status}: there is nothing to cancel"
        raise ApiError(409, message, code="batch_ended")
    service.jobs.wake()
    return _batch(batch)


# ---- pages and routes


class _Asked(NamedTuple):
    """Which page of a list."""

    limit: int
    after: str | None
    newest_first: bool

    @classmethod
    def of(cls, request: Request, usual: int, most: int, *more: str) -> "_Asked":
        """`more`: the parameters that the list has besides."""
        query = request.query_params
        known = ("limit", "after", "order", *more)
        for name in query:
            if name not in known:
                message = f"there is no parameter {name!r:.100}; there are {', '.join(known)}"
                raise ApiError(400, message, param=name)
        limit = query.get("limit", str(usual))
        if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
            raise ApiError(400, f"limit must be from 1 to {most}", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order must be asc or desc", param="order")
        return cls(int(limit), query.get("after"), order == "desc")


def _checked_page(page: Page | None, asked: _Asked) -> Page:
    if page is None:
        raise ApiError(400, f"there is nothing with the id {asked.after!r:.100}", param="after")
    return page


def add_jobs(app: FastAPI, service: Service) -> None:
    _add_files(app, service)
    _add_file(app, service)
    _add_batches(app, service)


def _add_files(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/files",
        summary="Keep a file of requests, as a form with file and purpose",
        responses=post_error_responses(400),
        openapi_extra=_FORM,
        response_model=FileReply,
    )
    async def upload(request: Request) -> Response:
        return await _upload(service, request)

    @app.get("/v1/files", summary="The key's files", responses=error_responses(400, 503))
    async def files(request: Request) -> FileList:
        asked = _Asked.of(request, MAX_LISTED, MAX_LISTED, "purpose")
        owner, purpose = _owner(request), request.query_params.get("purpose")
        page = await _stored(
            service, lambda store: store.files(owner, **asked._asdict(), purpose=purpose)
        )
        data = [_file(file) for file in _checked_page(page, asked).data]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        has_more = page is not None and page.has_more
        return FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


def _add_file(app: FastAPI, service: Service) -> None:
    async def find(request: Request, file_id: str) -> StoredFile:
        owner = _owner(request)
        found = await _stored(service, lambda store: store.file(owner, file_id))
        if found is None:
            raise _no_file(file_id)
        return found

    @app.get("/v1/files/{file_id}", summary="One of them", responses=error_responses(404, 503))
    async def file(request: Request, file_id: str) -> FileReply:
        return _file(await find(request, file_id))

    @app.delete(
        "/v1/files/{file_id}", summary="Forget a file", responses=error_responses(404, 409, 503)
    )
    async def delete(request: Request, file_id: str) -> DeletedFile:
        owner = _owner(request)
        if not await _stored(service, lambda store: store.delete_file(owner, file_id)):
            raise _no_file(file_id)
        return DeletedFile(id=file_id)

    @app.get(
        "/v1/files/{file_id}/content",
        summary="What a file holds",
        response_class=FileResponse,
        responses=error_responses(404, 503),
    )
    async def content(request: Request, file_id: str) -> Response:
        await find(request, file_id)
        path = (await service.jobs.store()).path_of(file_id)
        if not path.is_file():
            raise ApiError(404, f"the content of {file_id} is gone", code="file_not_found")
        return FileResponse(path, media_type="application/octet-stream")


def _add_batches(app: FastAPI, service: Service) -> None:
    @app.get("/v1/batches", summary="The key's batches", responses=error_responses(400, 503))
    async def batches(request: Request) -> BatchList:
        asked = _Asked.of(request, 20, _MAX_BATCHES_LISTED)
        owner = _owner(request)
        page = await _stored(service, lambda store: store.batches(owner, **asked._asdict()))
        data = [_batch(batch) for batch in _checked_page(page, asked).data]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        has_more = page is not None and page.has_more
        return BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)

    @app.get("/v1/batches/{batch_id}", summary="One of them", responses=error_responses(404, 503))
    async def batch(request: Request, batch_id: str) -> BatchReply:
        owner = _owner(request)
        found = await _stored(service, lambda store: store.batch(owner, batch_id))
        if found is None:
            raise _no_batch(batch_id)
        return _batch(found)

    @app.post(
        "/v1/batches/{batch_id}/cancel",
        summary="End a batch early, with the answers that it has",
        responses=post_error_responses(404, 409),
    )
    async def cancel(request: Request, batch_id: str) -> BatchReply:
        return await _cancel(service, _owner(request), batch_id)


_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": [INPUT]},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}
