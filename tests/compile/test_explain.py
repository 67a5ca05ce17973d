"""Why a cache serves a model or not: each difference by name, and the same words in every miss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache.details import Details
from pwcc.cache.errors import CacheMiss, HostMismatch
from pwcc.cache.explain import Answer, Outcome
from pwcc.cache.host_record import HostRecord, read_host_record
from pwcc.cache.ids import FactorDigest, LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import TABLES_ONLY, Policy, SiteEnvironment
from pwcc.cache.requirements import Requirement
from pwcc.cache.store import Store
from pwcc.compile.build_factors import build_factors
from pwcc.compile.explain import MAX_NEAR, explain_compile, explain_load
from pwcc.compile.here import Here, record_host
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import BuiltModel, ModelRef, build
from pwcc.compile.precompile import precompile
from pwcc.compile.request import Request, make_request
from pwcc.compile.split import DEFAULT_SPLITTING_OPS
from pwcc.compile.target import target_of
from tests.conftest import Warm

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def built(**args: object) -> BuiltModel:
    return build(ModelRef.parse("llama-tiny"), args={"layers": 2, **args}, weights="random")


def view(model: nn.Module, tag: str | None = None) -> Here:
    return Here.now(model, target_of("cpu"), tag=tag)


def load_answer(root: Path, model: nn.Module, tag: str | None = None) -> Answer:
    return explain_load(Store.open(root), view(model, tag))


def request_of(
    given: BuiltModel, *sizes: int, policy: Policy = TABLES_ONLY, cpu_baseline: str = "native"
) -> Request:
    return make_request(
        given.module,
        specs=input_specs(given.module, example_inputs=given.example_inputs),
        sizes=sizes,
        max_tokens=8192,
        device="cpu",
        identity=given.identity,
        args=given.args,
        splitting_ops=DEFAULT_SPLITTING_OPS,
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=True,
        policy=policy,
    )


def compile_answer(root: Path, given: BuiltModel, *sizes: int, policy: Policy = TABLES_ONLY) -> Answer:
    request = request_of(given, *sizes, policy=policy)
    made = build_factors(request.options, request.target, request.identity, request.args, policy)
    return explain_compile(Store.open(root), view(given.module), request, made)


def paths(answer: Answer) -> list[str]:
    (verdict,) = answer.verdicts
    return [difference.path for difference in verdict.differences]


def only(root: Path) -> tuple[Store, Manifest, Path]:
    store = Store.open(root)
    (ref,) = store.entries()
    return store, store.read_manifest(ref), ref.manifest


def rewrite(root: Path, change: Callable[[Store, Manifest], Manifest]) -> Manifest:
    """Replace the one entry's manifest by a changed one."""
    store, manifest, path = only(root)
    changed = change(store, manifest)
    path.write_bytes(changed.serialise())
    return changed


# What would be taken


def test_a_hit_names_the_entry_for_both_questions(llama: Warm) -> None:
    key = llama.report["entry_key"]
    for answer in (load_answer(llama.root, built().module), compile_answer(llama.root, built(), 1, 2)):
        assert answer.outcome is Outcome.HIT
        assert [v.entry_key for v in answer.verdicts if v.taken] == [key]
        assert answer.lines()[0].endswith(f"hit, entry {key[:12]}")


def test_a_constant_is_named_with_both_values_and_in_the_same_words_everywhere(llama: Warm) -> None:
    other = built(eps=1e-4)
    answer = load_answer(llama.root, other.module)
    assert answer.outcome is Outcome.MISS
    assert {path.rpartition(".")[2] for path in paths(answer)} == {"eps"}
    with pytest.raises(CacheMiss) as caught:
        pwcc.load(other.module, cache_dir=llama.root)
    assert caught.value.reasons == answer.reasons()
    assert "compiled with 1e-05, found 0.0001" in answer.reasons()[0]
    assert "build the model as it was compiled" in str(caught.value.hint)
    assert "(and 2 more: pwcc explain)" in answer.reasons()[0]  # five norms, three named


def test_a_compile_with_other_options_names_the_option_in_the_words_of_frozen(llama: Warm) -> None:
    answer = compile_answer(llama.root, built(), 1, 4)
    assert paths(answer) == ["configuration/options.sizes[1]"]
    given = built()
    with pytest.raises(CacheMiss) as caught:
        precompile(
            given.module,
            cache_dir=llama.root,
            specs=input_specs(given.module, example_inputs=given.example_inputs),
            sizes=(1, 4),
            max_tokens=8192,
            device="cpu",
            identity=given.identity,
            args=given.args,
            frozen=True,
        )
    assert caught.value.reasons == answer.reasons()
    assert "pass the same options" in str(caught.value.hint)


def test_an_environment_variable_is_named(llama: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    answer = compile_answer(llama.root, built(), 1, 2)
    assert paths(answer) == ["environment/TORCHINDUCTOR_FREEZING"]
    assert load_answer(llama.root, built().module).outcome is Outcome.HIT  # a build fact


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_a_global_mode_is_named_across_lookup_keys(llama: Warm, request: pytest.FixtureRequest) -> None:
    given = built()
    request.getfixturevalue("float64")
    for answer in (load_answer(llama.root, given.module), compile_answer(llama.root, given, 1, 2)):
        assert paths(answer) == ["compiler/numeric state.default_dtype"]
        (verdict,) = answer.verdicts
        assert not verdict.same_key
        assert "compiled with 'torch.float32', now 'torch.float64'" in verdict.reason()


def test_another_structure_names_the_nearest_entry_and_its_rows(llama: Warm) -> None:
    answer = load_answer(llama.root, built(vocab=500).module)
    assert paths(answer) == ["model/tensor embed.weight", "model/tensor lm_head.weight"]
    assert "parameter torch.float32 [512, 128], now parameter torch.float32 [500, 128]" in answer.reasons()[0]
    wanted = compile_answer(llama.root, built(layers=3), 1, 2)
    assert wanted.verdicts[0].differences[0].path == "configuration/model arguments.layers"


def test_nothing_near_lists_what_the_cache_holds(llama: Warm) -> None:
    answer = load_answer(llama.root, nn.Linear(2, 2).eval())
    assert answer.verdicts == ()
    first, second = answer.reasons()
    assert first == "the cache holds no entry for this model tree: torch.nn.modules.linear:Linear, float32, cpu"
    assert second.startswith(
        f"it holds {llama.report['entry_key'][:12]}: builtin:llama-tiny layers=2, float32, cpu"
    )


def test_a_tag_is_named(llama: Warm) -> None:
    answer = load_answer(llama.root, built().module, tag="encoder")
    assert paths(answer) == ["configuration/options.tag"]  # as a compile's answer has it
    assert "configuration/options.tag: built with nothing, now 'encoder'" in answer.reasons()[0]


def test_another_signature_is_named(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")

    def change(store: Store, manifest: Manifest) -> Manifest:
        assert manifest.details is not None
        details = Details.from_bytes(store.read_blob(manifest.details))
        data = replace(details, signature=[["tokens", "None"]]).to_bytes()
        digest = store.put_blob(data)
        return replace(manifest, details=digest, blobs={**manifest.blobs, digest: len(data)})

    moved(root, rewrite(root, change))
    answer = load_answer(root, built().module)
    assert paths(answer) == ["model/forward"]
    assert "compiled with (tokens=None), now (input_ids, positions)" in answer.reasons()[0]


def moved(root: Path, manifest: Manifest, key: str = "0" * 32) -> None:
    """Put the one entry under another lookup key, as if something of it had differed."""
    store = Store.open(root)
    (ref,) = store.entries()
    other = store.entry_ref(LookupKey(key), ref.entry_key)
    other.path.parent.mkdir()
    ref.path.rename(other.path)
    other.manifest.write_bytes(replace(manifest, lookup_key=other.lookup_key).serialise())


# Sources


def test_a_changed_source_is_named_with_the_size_of_its_diff(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    name = "pwcc.compile.models.llama:pwcc/compile/models/llama.py"

    def change(store: Store, manifest: Manifest) -> Manifest:
        assert manifest.details is not None
        details = Details.from_bytes(store.read_blob(manifest.details))
        lines = details.lines[name]
        data = replace(details, lines={**details.lines, name: (*lines[:9], b"gone", *lines[11:])}).to_bytes()
        digest = store.put_blob(data)
        sources = tuple(
            replace(record, digest=FactorDigest("0" * 32)) if record.path.endswith("llama.py") else record
            for record in manifest.sources
        )
        return replace(manifest, sources=sources, details=digest, blobs={**manifest.blobs, digest: len(data)})

    rewrite(root, change)
    answer = load_answer(root, built().module)
    assert paths(answer) == [f"sources/{name}"]
    assert "llama.py changed (was 00000000, is " in answer.reasons()[0]
    assert "; +2 -1 lines)" in answer.reasons()[0]


def test_every_traced_file_has_its_lines_recorded_and_no_text(llama: Warm) -> None:
    store, manifest, _ = only(llama.root)
    assert manifest.details is not None
    data = store.read_blob(manifest.details)
    details = Details.from_bytes(data)
    files = {f"{r.module}:{r.path}" for r in manifest.sources if r.kind == "file"}
    assert files == set(details.lines)
    assert all(details.lines.values())
    assert b"def forward" not in data
    assert b"/" + b"llama.py" not in data.replace(b"models/llama.py", b"")


# A site's policy


def test_an_included_variable_is_compared_without_any_configuration(
    llama: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = llama.copy(tmp_path / "cache")
    policy = Policy.of(include=["MYAPP_*"])
    site = SiteEnvironment.record(policy, {"MYAPP_MODE": "fast"})
    rewrite(root, lambda _, manifest: replace(manifest, site_environment=site))
    answer = load_answer(root, built().module)
    assert paths(answer) == ["environment/MYAPP_MODE (site policy)"]
    assert "environment MYAPP_MODE: built with 'fast', now nothing" in answer.reasons()[0]
    monkeypatch.setenv("MYAPP_MODE", "fast")
    assert pwcc.load(built().module, cache_dir=root).receipt.is_clean
    monkeypatch.setenv("MYAPP_OTHER", "/secret/place")
    with pytest.raises(CacheMiss, match="MYAPP_OTHER: built with nothing, now 'digest:") as caught:
        pwcc.load(built().module, cache_dir=root)
    assert "secret" not in str(caught.value)


def test_a_compile_records_the_policy_and_hits_under_the_same(
    llama: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = llama.copy(tmp_path / "cache")
    monkeypatch.setenv("MYAPP_MODE", "fast")
    policy = Policy.of(include=["MYAPP_*"])
    given = built()

    def run(policy: Policy) -> str:
        report = precompile(
            given.module,
            cache_dir=root,
            specs=input_specs(given.module, example_inputs=given.example_inputs),
            sizes=(1,),
            max_tokens=8192,
            device="cpu",
            identity=given.identity,
            args=given.args,
            policy=policy,
            observation=given.observation,
        )
        assert report.counters.compiles == 0  # the pieces are those of the session's entry
        return report.entry_key if not report.hit else "hit"

    plain, with_policy = run(TABLES_ONLY), run(policy)
    assert plain != with_policy
    assert (run(policy), run(TABLES_ONLY)) == ("hit", "hit")
    answer = compile_answer(root, given, 1, policy=Policy.of(include=["OTHER"]))
    assert any(p.startswith("configuration/environment policy") for p in
               (d.path for v in answer.verdicts for d in v.differences))  # fmt: skip
    chosen = pwcc.load(given.module, cache_dir=root, policy=policy)
    assert chosen.manifest.entry_key == with_policy
    assert chosen.manifest.site_environment == SiteEnvironment(policy, {"MYAPP_MODE": "fast"})
    monkeypatch.setenv("MYAPP_MODE", "slow")
    with pytest.raises(CacheMiss, match="MYAPP_MODE: built with 'fast', now 'slow'"):
        pwcc.load(given.module, cache_dir=root, entry=with_policy)
    monkeypatch.setenv("MYAPP_MODE", "fast")
    with pytest.raises(CacheMiss, match="environment policy: expected include OTHER, got include MYAPP_"):
        pwcc.load(given.module, cache_dir=root, entry=with_policy, policy=Policy.of(include=["OTHER"]))


# Hosts


H200 = {"type": "cuda", "name": "NVIDIA H200", "capability": "9.0", "cuda": "13.0", "machine": None}


def here_record(tmp_path: Path, **changes: object) -> HostRecord:
    """This host's record, through its file."""
    record = record_host(target_of("cpu"), TABLES_ONLY, {})
    path = tmp_path / "host.json"
    path.write_text(json.dumps({**record.to_json(), **changes}))
    return read_host_record(path)


def test_this_hosts_own_record_predicts_a_hit(llama: Warm, tmp_path: Path) -> None:
    here = view(built().module).on(here_record(tmp_path))
    assert here.lookup_key == llama.report["lookup_key"]
    answer = explain_load(Store.open(llama.root), here)
    assert answer.outcome is Outcome.HIT


def test_another_host_misses_and_every_requirement_is_named(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    extra = (Requirement("cpu_flags", ("avx", "avx1024")), Requirement("glibc", "99.0"))
    kept = only(root)[1].requirements
    rewrite(
        root,
        lambda _, m: replace(
            m, requirements=(*(r for r in kept if r.kind not in ("cpu_flags", "glibc")), *extra)
        ),
    )
    answer = explain_load(Store.open(root), view(built().module).on(here_record(tmp_path)))
    assert answer.outcome is Outcome.HOST
    assert paths(answer) == ["requirement/cpu_flags", "requirement/glibc"]
    with pytest.raises(HostMismatch) as caught:
        pwcc.load(built().module, cache_dir=root)
    assert caught.value.reasons == answer.reasons()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "device": {
                    "type": "cuda",
                    "name": "NVIDIA H200",
                    "capability": "9.0",
                    "cuda": "13.0",
                    "machine": None,
                }
            },
            "device: built for cpu, got NVIDIA H200",
        ),
        ({"torch": "9.9.9 abc"}, "9.9.9"),
    ],
)
def test_a_host_that_is_not_here(llama: Warm, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    facts = record_host(target_of("cpu"), TABLES_ONLY, {}).to_json()["facts"]
    assert isinstance(facts, dict)
    if "torch" in changes:
        changes = {**changes, "facts": {**facts, "torch": changes["torch"]}}
    answer = explain_load(Store.open(llama.root), view(built().module).on(here_record(tmp_path, **changes)))
    assert answer.outcome is Outcome.HOST
    assert named in answer.reasons()[0]


def test_a_hosts_site_variables_are_compared_from_its_record(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    policy = Policy.of(include=["MYAPP"])
    site = SiteEnvironment.record(policy, {"MYAPP": "1"})
    rewrite(root, lambda _, manifest: replace(manifest, site_environment=site))
    for value, outcome in (("1", Outcome.HIT), ("2", Outcome.MISS)):
        record = record_host(target_of("cpu"), policy, {"MYAPP": value})
        assert explain_load(Store.open(root), view(built().module).on(record)).outcome is outcome
    silent = record_host(target_of("cpu"), TABLES_ONLY, {})
    (reason,) = explain_load(Store.open(root), view(built().module).on(silent)).reasons()
    assert "not recorded: --env-include MYAPP" in reason


# Damage and bounds


def test_a_damaged_blob_is_named_and_is_no_hit(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    store, manifest, _ = only(root)
    store.blob_path(manifest.programs[0].stitch).write_bytes(b"?")
    for answer in (load_answer(root, built().module), compile_answer(root, built(), 1, 2)):
        assert answer.outcome is Outcome.MISS
        assert paths(answer) == ["entry/blobs"]
        assert "pwcc verify" in answer.lines()[-1]


def test_lost_details_only_cost_the_details(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    store, manifest, _ = only(root)
    assert manifest.details is not None
    store.blob_path(manifest.details).unlink()
    assert paths(load_answer(root, built(vocab=500).module)) == ["model/tree"]


def test_many_near_entries_are_bounded(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    store, manifest, _ = only(root)
    for number in range(20):
        ref = store.entry_ref(LookupKey(f"{number:032x}"), manifest.entry_key)
        ref.path.mkdir(parents=True)
        ref.manifest.write_bytes(replace(manifest, lookup_key=ref.lookup_key).serialise())
    answer = load_answer(root, built(vocab=500).module)
    assert len(answer.verdicts) == MAX_NEAR
    assert len("\n".join(answer.reasons())) < 4000


ASKING = """
import sys
from pwcc.cli import main
started, written = [], []
def hook(event, args):
    if event == "subprocess.Popen":
        started.append(str(args[0]))
    if event == "open" and args[0] != "/dev/null" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        written.append(str(args[0]))
sys.addaudithook(hook)
code = main(sys.argv[1:])
compilers = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
print(code, compilers, [s for s in started if "g++" not in s and "c++" not in s], written)
"""


def test_asking_traces_compiles_and_writes_nothing(llama: Warm) -> None:
    options = [*llama.model, *llama.options, "--cache-dir", str(llama.root)]
    done = llama.machine.run("-c", ASKING, "explain", *options)
    assert done.stdout.splitlines()[-1] == "0 [] [] []", done.stdout
    assert done.stderr == ""


def test_a_relocated_process_says_the_same_key(llama: Warm) -> None:
    code = (
        "from pwcc.compile.here import Here\n"
        "from pwcc.compile.model_ref import ModelRef, build\n"
        "from pwcc.compile.target import target_of\n"
        "model = build(ModelRef.parse('llama-tiny'), args={'layers': 2}).module\n"
        "print(Here.now(model, target_of('cpu')).lookup_key)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == llama.report["lookup_key"]


def test_a_load_under_another_policy_says_what_to_do(llama: Warm) -> None:
    policy = Policy.of(exclude=["MYAPP_*"])
    answer = explain_load(Store.open(llama.root), view(built().module), policy=policy)
    assert paths(answer) == ["choice/environment policy"]
    assert "--env-include/--env-exclude" in "; ".join(answer.advice())
