"""Serve: the engine over HTTP: ``POST /generate``, ``GET /metrics``, ``GET /healthz``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.engine import Engine
from serving.scheduler import Busy, End, Event, Refused, Request

MAX_BODY = 8 * 2**20
FIELDS = ("token_ids", "prompt", "max_new_tokens", "stop_token_ids", "stream")
DEFAULT_NEW_TOKENS = 16


class Tokenizer(Protocol):
    """What a text prompt needs; transformers' tokenizers have both."""

    def encode(self, text: str) -> list[int]:
        """Return the text's tokens."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the tokens' text."""
        ...


class BadRequest(Exception):
    """A body that is not what ``/generate`` takes; ``status`` is 400 or 413."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The routes over one engine.

    ``facts`` is what ``/healthz`` reports of load and capture; ``stop`` are tokens that end every answer.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        facts: Mapping[str, Any],
        metrics: Callable[[], str],
        tokenizer: Tokenizer | None = None,
        stop: Sequence[int] = (),
    ) -> None:
        self._engine, self._facts, self._metrics, self._tokenizer = engine, facts, metrics, tokenizer
        self._stop = stop

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/healthz", self.healthz),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def generate(self, http: HttpRequest) -> Response:
        """Answer ``{"token_ids": [...]}`` or ``{"prompt": "text"}`` with the greedy continuation."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def heard(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            asked = parse(await _body(http), self._tokenizer)
            stop = (*self._stop, *asked["stop"])
            request = self._engine.submit(asked["tokens"], asked["max_new_tokens"], heard, stop=stop)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except BadRequest as error:
            return _error(error.status, str(error))
        except Refused as error:
            return _error(422, str(error))
        except Busy as error:
            status = 503 if self._engine.broken or self._engine.closing else 429
            return _error(status, str(error), {"Retry-After": "1"})
        if asked["stream"]:
            return StreamingResponse(self._stream(request, events), media_type="application/x-ndjson")
        return await self._whole(http, request, events)

    async def _whole(self, http: HttpRequest, request: Request, events: asyncio.Queue[Event]) -> Response:
        gone = asyncio.create_task(_disconnected(http))
        ended = asyncio.create_task(_until_end(events))
        await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():  # nobody waits for the answer: its blocks are of use to others
            self._engine.cancel(request)
        end = await ended
        gone.cancel()
        if end.reason == "error":
            return _error(500, end.message)
        return JSONResponse(
            {
                "token_ids": request.output,
                "text": self._text(request.output),
                "finish_reason": end.reason,
                "prompt_tokens": len(request.prompt),
            }
        )

    async def _stream(self, request: Request, events: asyncio.Queue[Event]) -> AsyncIterator[str]:
        """Yield one JSON object per line: every token, then how it ended."""
        try:
            while not isinstance(event := await events.get(), End):
                yield json.dumps({"token_id": event, "text": self._text([event])}) + "\n"
            last = {"finish_reason": event.reason, "prompt_tokens": len(request.prompt)}
            yield json.dumps(last | ({"error": event.message} if event.message else {})) + "\n"
        finally:
            self._engine.cancel(request)

    def _text(self, tokens: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(tokens)

    async def metrics(self, _http: HttpRequest) -> Response:
        """Answer with Prometheus' text format."""
        return PlainTextResponse(self._metrics(), media_type="text/plain; version=0.0.4")

    async def healthz(self, _http: HttpRequest) -> Response:
        """Answer 200 while requests can be served, else 503; always with the receipts of load and capture."""
        why = self._engine.broken or ("the server is about to end" if self._engine.closing else None)
        status = {"status": "ok"} if why is None else {"status": "unavailable", "reason": why}
        return JSONResponse(status | dict(self._facts), status_code=200 if why is None else 503)


def parse(body: bytes, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return tokens, max_new_tokens, stop and stream of a body; raise ``BadRequest`` with what is wrong."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"expected a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise BadRequest(f"expected a JSON object, got a {type(given).__name__}")
    unknown = next((name for name in given if name not in FIELDS), None)
    if unknown is not None:
        raise BadRequest(f"unknown field {unknown!r}; expected {', '.join(FIELDS)}")
    if ("token_ids" in given) == ("prompt" in given):
        raise BadRequest("expected one of token_ids and prompt")
    stream = given.get("stream", False)
    if not isinstance(stream, bool):
        raise BadRequest(f"stream: expected true or false, got {stream!r}")
    return {
        "tokens": _tokens(given, tokenizer),
        "max_new_tokens": _integer(given.get("max_new_tokens", DEFAULT_NEW_TOKENS), "max_new_tokens"),
        "stop": _integers(given.get("stop_token_ids", []), "stop_token_ids"),
        "stream": stream,
    }


def _tokens(given: Mapping[str, object], tokenizer: Tokenizer | None) -> list[int]:
    if "token_ids" in given:
        return _integers(given["token_ids"], "token_ids")
    if tokenizer is None:
        raise BadRequest("prompt: this model has no tokenizer; send token_ids")
    text = given["prompt"]
    if not isinstance(text, str):
        raise BadRequest(f"prompt: expected text, got a {type(text).__name__}")
    return list(tokenizer.encode(text))


def _integers(value: object, name: str) -> list[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{name}: expected a list of integers, got a {type(value).__name__}")
    return [_integer(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: expected an integer, got {value!r:.80}")
    return value


async def _body(http: HttpRequest) -> bytes:
    found = bytearray()
    async for chunk in http.stream():
        found += chunk
        if len(found) > MAX_BODY:
            raise BadRequest(f"expected a body of at most {MAX_BODY} bytes", status=413)
    return bytes(found)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _until_end(events: asyncio.Queue[Event]) -> End:
    while not isinstance(event := await events.get(), End):
        pass
    return event


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


async def _http_error(_http: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _error(error.status_code, error.detail, error.headers)
