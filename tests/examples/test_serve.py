"""The server as a process: concurrent answers equal eager greedy tokens, metrics count, SIGTERM ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pwcc.compile.model_ref import ModelRef, build
from tests.conftest import REPOSITORY, Warm
from tests.examples.conftest import module

pytestmark = pytest.mark.slow
pytest.importorskip("uvicorn")

SCRIPT = REPOSITORY / "examples" / "serve.py"
ARGS = ("--model", "llama-tiny", "--arg", "layers=2", "--device", "cpu")
SMALL = ("--sizes", "1,2,4,8", "--max-num-seqs", "4", "--max-tokens", "16", "--max-seq-len", "64")


class Server:
    """A running server and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def generate(self, **body: object) -> dict[str, Any]:
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


def start(*options: str | Path, env: dict[str, str]) -> Server:
    command = [sys.executable, str(SCRIPT), *ARGS, *map(str, options), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"serving .* on (http://\S+)", line):
            return Server(process, match[1])
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def served(llama: Warm) -> Iterator[Server]:
    server = start("--cache-dir", llama.root, *SMALL, env={**os.environ})
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


def eager_greedy(prompt: list[int], new: int) -> list[int]:
    model = build(ModelRef.parse("llama-tiny"), args={"layers": 2}, weights="random").module
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            logits = model(torch.tensor(tokens), torch.arange(len(tokens)))
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_two_at_once_equal_eager_and_the_metrics_count_them(served: Server) -> None:
    prompts = [[1, 2, 3], list(range(40, 60))]  # the second is longer than a step: it comes in chunks
    before = served.get("/metrics")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda p: served.generate(token_ids=p, max_new_tokens=8), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["token_ids"] == eager_greedy(prompt, 8)
        assert answer["finish_reason"] == "length"
    after = served.get("/metrics")

    def grown(name: str) -> float:
        return metric(after, name) - metric(before, name)

    assert grown("pwcc_serve_generated_tokens_total") == 16
    assert grown("pwcc_serve_prompt_tokens_total") == 23
    # Each token but an answer's last one is computed once, in whichever graph.
    assert grown("pwcc_graph_tokens_total") == 23 + 14
    assert metric(after, 'pwcc_serve_requests_total{reason="length"}') >= 2
    assert metric(after, "pwcc_serve_free_blocks") == metric(after, "pwcc_serve_total_blocks")
    modes = set(re.findall(r'pwcc_graph_calls_total\{mode="(\w+)"', after))
    assert {"FULL", "PIECEWISE"} <= modes


def test_health_reports_load_and_capture(served: Server, llama: Warm) -> None:
    health = json.loads(served.get("/healthz"))
    assert health["status"] == "ok"
    assert health["entry"] == llama.report["entry_key"]
    assert health["load"]["clean"]
    assert health["backend"] == "fake"
    assert health["capture"]["done"]
    assert {row["size"] for row in health["capture"]["rows"]} == {1, 2, 4, 8}


def test_a_bad_request_over_http(served: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.generate(token_ids=[10**6])
    assert caught.value.code == 422
    assert "from 0 to 511" in json.loads(caught.value.read())["error"]


def test_sigterm_finishes_what_runs_and_exits_with_0(served: Server) -> None:
    """Last: it ends the server."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.generate, token_ids=[5], max_new_tokens=40)
        while metric(served.get("/metrics"), "pwcc_serve_running") < 1 and not running.done():
            pass
        code, said = served.end()
        assert running.result()["token_ids"] == eager_greedy([5], 40)
    assert code == 0, said
    assert said.splitlines()[-1] == "ended"


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_check_compares_every_token_with_eager(llama: Warm, mode: str) -> None:
    options = ("--check", "6", "--new-tokens", "5", "--mode", mode, "--num-blocks", "16")
    command = [sys.executable, str(SCRIPT), *ARGS, "--cache-dir", str(llama.root), *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("30 tokens compared with eager, 30 equal; ")


@pytest.mark.hf
def test_text_needs_the_directorys_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    made.save_pretrained(tmp_path)
    find: Any = module("serve").find_tokenizer
    tokenizer, ends = find(str(tmp_path))
    assert tokenizer.encode("b a b") == [2, 1, 2]
    assert tokenizer.decode([1, 2]) == "a b"
    assert ends == (0,)
    assert find("llama-tiny") == (None, ())


def test_a_cache_without_the_model_is_a_miss(tmp_path: Path, llama: Warm) -> None:
    command = [sys.executable, str(SCRIPT), "--model", "llama-tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--cache-dir", str(llama.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_saved_plan_is_used_and_sets_the_limits(llama: Warm, tmp_path: Path) -> None:
    cache = llama.copy(tmp_path / "cache")
    options = ("--sizes", "1,2", "--max-num-seqs", "2", "--max-tokens", "9", "--max-seq-len", "32")
    llama.machine.pwcc("capture", cache, *llama.model, *options, "--name", "mine")
    command = [sys.executable, str(SCRIPT), *ARGS, "--cache-dir", str(cache), "--json", "--check", "3"]
    done = subprocess.run([*command, "--plan", "mine"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts, end = json.JSONDecoder().raw_decode(done.stdout)
    assert {row["size"] for row in facts["capture"]["rows"]} == {1, 2}
    assert done.stdout[end:].strip().startswith("48 tokens compared with eager, 48 equal")
    done = subprocess.run([*command, "--plan", "other"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no plan 'other' is saved" in done.stderr
