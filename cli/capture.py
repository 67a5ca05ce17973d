"""``pwcc capture``: load an entry, capture its graphs here, say what they take, and save the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, StoreError, UsageError
from pwcc.cache.strict import Json
from pwcc.cli import capture_view, output
from pwcc.cli.byte_count import parse_byte_count
from pwcc.cli.invocation import DebugOption, JsonOption, RequireSignatureOption
from pwcc.cli.model_options import BuildOptions, EntryNameOption, ModelOption, ReadyModel, TagOption
from pwcc.cli.spread import spread

if TYPE_CHECKING:
    from pwcc.cache.store import Store
    from pwcc.capture.plan import CapturePlan
    from pwcc.compile.compiled_model import CompiledModel
    from pwcc.compile.ops.paged import PagedKVCache


@spread
def capture(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A cache directory; the plan is saved in it if it can be.")
    ],
    *,
    model: ModelOption,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Token counts such as 1,2,4-8. Default: 1,2,4,8,16,... to twice --max-num-seqs, at most 512.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (decode: one graph)."),
    ] = "FULL_AND_PIECEWISE",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most sequences of a batch.")] = 256,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a batch. Default: the entry's.")
    ] = None,
    max_seq_len: Annotated[
        int, typer.Option(min=1, help="The longest sequence, in tokens, that full graphs hold for.")
    ] = 2048,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Leave out the largest sizes that do not fit, such as 2GiB."),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(min=2, help="Blocks of the KV cache. Default: enough for one longest sequence."),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    instantiate: Annotated[
        Literal["eager", "lazy"],
        typer.Option(help="Make graphs executable now, or each at its first replay."),
    ] = "eager",
    on_failure: Annotated[
        Literal["raise", "fallback"],
        typer.Option(help="A size that cannot be captured: end with advice, or go on without it."),
    ] = "raise",
    backend: Annotated[
        Literal["cuda", "fake"] | None,
        typer.Option(help="Default: the device's graphs; fake on a CPU, which has none."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the saved plan.")] = "default",
    profile: EntryNameOption = None,
    tag: TagOption = None,
    how: BuildOptions,
    require_signature: RequireSignatureOption = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Capture a model's graphs here and say what each size takes.

    It does what a serving host does: load, make a KV cache, capture; seconds, MiB and nodes are
    reported. The plan (sizes, mode, order, what it took) is saved under the cache's plans, for a
    server to reuse.
    """
    from pwcc.cache.store import Store

    # A wrong path is said before torch is imported.
    store = Store.find(directory, hint=f"run: pwcc compile --model {model} --cache-dir {directory}")
    limit = None if max_memory is None else parse_byte_count(max_memory, option="--max-memory")
    _check_name(name)
    from pwcc.capture.backend import backend_for
    from pwcc.capture.modes import parse_mode
    from pwcc.capture.planning import plan_for
    from pwcc.capture.runner import GraphRunner
    from pwcc.capture.sizes import parse_sizes
    from pwcc.compile.load import load as load_entry

    wanted = parse_mode(mode)
    ready = how.build(model)
    graphs = backend_for(ready.device, backend)
    compiled = load_entry(
        ready.built.module, cache_dir=directory, profile=profile, tag=tag, require_signature=require_signature
    )
    most = compiled.manifest.max_tokens if max_tokens is None else max_tokens
    plan = plan_for(
        compiled,
        mode=wanted,
        sizes=None if sizes is None else parse_sizes(sizes, max_tokens=most),
        max_num_seqs=max_num_seqs,
        max_tokens=max_tokens,
        max_seq_len=max_seq_len,
        instantiate=instantiate,
        on_failure=on_failure,
    )
    for note in plan.notes:
        output.word(f"note: {note}")
    if graphs.name == "fake":
        output.word(
            "note: the fake backend stands in for graphs: it shows what is captured and checks addresses; "
            "its seconds and MiB say nothing of a GPU"
        )
    blocks = num_blocks or -(-max_seq_len // block_size) + 1
    runner = GraphRunner(
        compiled,
        plan,
        cache=_cache(compiled, ready, num_blocks=blocks, block_size=block_size),
        backend=graphs,
    )
    try:
        estimate = runner.estimate()
        report = runner.capture(max_bytes=limit, estimated=estimate)
        done = runner.plan
    finally:
        runner.close()
    saved, problem = _save(store, done, name)
    for line in capture_view.failure_lines(report):
        output.word(f"warning: {line}")
    if problem:
        output.word(f"warning: the plan was not saved: {problem}")
    if json:
        found: dict[str, Json] = {
            "entry": done.entry_key,
            "device": str(ready.device),
            "plan": done.to_json(),
            "saved": saved,
            "estimate": estimate.to_json(),
            "report": report.to_json(),
            "load": compiled.receipt.to_json(),
        }
        output.data_json(found)
    else:
        output.data(
            capture_view.capture_lines(done, report, estimate, saved=saved or "not saved", width=output.width())
        )


def _check_name(name: str) -> None:
    try:
        strict.as_name(name, "--name")
    except CorruptEntry as error:
        raise UsageError(error.message) from None


def _cache(
    compiled: CompiledModel, ready: ReadyModel, *, num_blocks: int, block_size: int
) -> PagedKVCache | None:
    """Return a KV cache of the shape that the model's attention stores; None where it stores nothing.

    Raises:
        CaptureMemoryError: there is no room for it.
    """
    from pwcc.capture.checks import memory_for
    from pwcc.compile.input_values import make_call
    from pwcc.compile.ops.kv_layout import observe_kv_layout

    count = max(1, compiled.manifest.min_tokens)
    call = make_call(ready.built.module, ready.specs, count, device=ready.device)
    layout = observe_kv_layout(lambda: compiled(*call.args, **call.kwargs))
    if layout is None:
        return None
    total = num_blocks * layout.block_bytes(block_size)
    with memory_for(
        f"a KV cache of {total} bytes ({num_blocks} blocks of {block_size} tokens)",
        hint="lower --num-blocks, --block-size or --max-seq-len",
    ):
        return layout.cache(num_blocks=num_blocks, block_size=block_size, device=ready.device)


def _save(store: Store, plan: CapturePlan, name: str) -> tuple[str | None, str]:
    """Save the plan; where the store cannot be written, return why: the report is worth having all the same."""
    from pwcc.capture.plan_store import save_plan

    try:
        return str(save_plan(store, plan, name)), ""
    except StoreError as error:
        return None, error.message
