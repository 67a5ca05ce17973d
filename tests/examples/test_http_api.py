"""The HTTP surface, as an ASGI application: answers, one clear message per bad request, streaming, health."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pwcc.compile.ops.blocks import BlockAllocator
from tests.examples.conftest import module

pytest.importorskip("starlette")


class Words:
    """A tokenizer of one letter per token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + token) for token in tokens)


class Server:
    """An application over an engine with a made-up model; ``hold`` blocks its steps."""

    def __init__(self, tokenizer: Words | None = None, *, waiting: int = 4) -> None:
        scheduling, engines = module("serving.scheduler"), module("serving.engine")
        self.hold = threading.Event()
        self.hold.set()
        blocks = BlockAllocator(num_blocks=17, block_size=4)
        limits = {"vocab": 100, "max_num_seqs": 1, "max_tokens": 8, "max_waiting": waiting}
        self.engine = engines.Engine(self.step, scheduling.Scheduler(blocks, **limits))
        api = module("serving.http_api").Api(
            self.engine, facts={"load": {"clean": True}}, metrics=lambda: "up 1\n", tokenizer=tokenizer
        )
        self.app = api.app()

    def step(self, batch: Sequence[Any]) -> list[int]:
        self.hold.wait(10)
        return [(work.request.prompt[0] + len(work.request.output) + 1) % 100 for work in batch]

    def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        return asyncio.run(self.acall(method, path, body))

    async def acall(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        gone: asyncio.Event | None = None,
        more: bool = False,
    ) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[dict[str, Any]] = []
        received = iter([{"type": "http.request", "body": data, "more_body": more}])
        gone = gone or asyncio.Event()

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "headers": [], "query_string": b"",
            "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await self.app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent).decode()
        return sent[0]["status"], text


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.hold.set()
    made.engine.close(5)


def test_generate(server: Server) -> None:
    status, text = server.call("POST", "/generate", {"token_ids": [5, 6], "max_new_tokens": 3})
    assert status == 200
    assert json.loads(text) == {
        "token_ids": [6, 7, 8],
        "text": None,
        "finish_reason": "length",
        "prompt_tokens": 2,
    }


def test_a_client_that_hangs_up_within_its_body_is_no_error(server: Server) -> None:
    async def hang_up() -> tuple[int, str]:
        gone = asyncio.Event()
        gone.set()
        return await server.acall("POST", "/generate", b'{"token_ids"', gone=gone, more=True)

    assert asyncio.run(hang_up()) == (400, "")
    assert server.call("POST", "/generate", {"token_ids": [5], "max_new_tokens": 1})[0] == 200


def test_stop_tokens_and_streaming(server: Server) -> None:
    body = {"token_ids": [5], "max_new_tokens": 9, "stop_token_ids": [7], "stream": True}
    status, text = server.call("POST", "/generate", body)
    assert status == 200
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line.get("token_id") for line in lines] == [6, 7, None]
    assert lines[-1] == {"finish_reason": "stop", "prompt_tokens": 1}


def test_text_with_a_tokenizer() -> None:
    server = Server(Words())
    status, text = server.call("POST", "/generate", {"prompt": "ab", "max_new_tokens": 2})
    server.engine.close(5)
    assert status == 200
    assert json.loads(text)["text"] == Words().decode([98, 99])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "expected a JSON object"),
        (b"[" * 100_000, 400, "expected a JSON object"),
        (b"\xff", 400, "expected a JSON object"),
        ([1], 400, "got a list"),
        ({}, 400, "expected one of token_ids and prompt"),
        ({"token_ids": [1], "prompt": "x"}, 400, "expected one of"),
        ({"prompt": "x"}, 400, "no tokenizer; send token_ids"),
        ({"token_ids": "1"}, 400, "token_ids: expected a list of integers, got a str"),
        ({"token_ids": [1, True]}, 400, "token_ids[1]: expected an integer, got True"),
        ({"token_ids": [1], "max_new_tokens": 1.5}, 400, "max_new_tokens: expected an integer, got 1.5"),
        ({"token_ids": [1], "max_tokens": 1}, 400, "unknown field 'max_tokens'"),
        ({"token_ids": [1], "stream": 1}, 400, "stream: expected true or false"),
        ({"token_ids": []}, 422, "at least one token"),
        ({"token_ids": [100]}, 422, "from 0 to 99, got 100"),
        ({"token_ids": [1], "max_new_tokens": 0}, 422, "at least 1, got 0"),
        ({"token_ids": [1], "max_new_tokens": 1000}, 422, "at most 65 tokens"),
        (b" " * (9 * 2**20), 413, "at most 8388608 bytes"),
    ],
)
def test_a_bad_request_gets_one_clear_message(server: Server, body: object, status: int, said: str) -> None:
    got, text = server.call("POST", "/generate", body)
    assert got == status
    assert said in json.loads(text)["error"]


def test_unknown_paths_and_methods(server: Server) -> None:
    assert server.call("GET", "/nothing")[0] == 404
    assert server.call("GET", "/generate") == (405, '{"error":"Method Not Allowed"}')


def test_a_full_queue_is_429() -> None:
    server = Server(waiting=1)
    server.hold.clear()

    async def crowd() -> tuple[int, str]:
        body = {"token_ids": [1], "max_new_tokens": 1}
        first = asyncio.create_task(server.acall("POST", "/generate", body))
        while server.engine.load().running < 1:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(server.acall("POST", "/generate", body))
        while server.engine.load().waiting < 1:
            await asyncio.sleep(0.01)
        third = await server.acall("POST", "/generate", body)
        server.hold.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]
        return third

    status, text = asyncio.run(crowd())
    server.engine.close(5)
    assert status == 429
    assert "1 requests wait already" in json.loads(text)["error"]


def test_a_client_that_left_frees_its_blocks(server: Server) -> None:
    async def leave() -> None:
        gone = asyncio.Event()
        server.hold.clear()
        body = {"token_ids": [1], "max_new_tokens": 50}
        call = asyncio.create_task(server.acall("POST", "/generate", body, gone=gone))
        while server.engine.load().running < 1:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.sleep(0.05)
        server.hold.set()
        await call

    asyncio.run(leave())
    load = server.engine.load()
    assert load.finished == {"cancelled": 1}
    assert load.free_blocks == 16


def test_health_and_metrics(server: Server) -> None:
    status, text = server.call("GET", "/healthz")
    assert (status, json.loads(text)) == (200, {"status": "ok", "load": {"clean": True}})
    assert server.call("GET", "/metrics") == (200, "up 1\n")
    server.engine.close(5)
    status, text = server.call("GET", "/healthz")
    assert (status, json.loads(text)["status"]) == (503, "unavailable")
    status, _ = server.call("POST", "/generate", {"token_ids": [1]})
    assert status == 503
