"""What a trace depends on becomes records, sources and predicates; what cannot be recorded is refused."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pwcc.cache import observed
from pwcc.cache.errors import TraceError, UnsealableError
from pwcc.cache.factors import FactorTree, entry_key
from pwcc.cache.policy import Policy
from pwcc.compile.build_factors import BuildFactors
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.observation import Observation
from pwcc.compile.predicates import collect
from pwcc.compile.request import make_request
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.tracing import trace_all
from pwcc.compile.witness import Evidence, Witness

SALT = "5" * 32
HEAD = """
import importlib.util, json, os
from pathlib import Path
import torch
from torch import nn

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
"""


def see(
    model: nn.Module,
    observation: Observation | None = None,
    policy: Policy | None = None,
    *,
    meanwhile: Callable[[], object] = dict,
) -> Evidence:
    """Do all of a compile but the compile; ``meanwhile`` stands for it."""
    request = make_request(
        model.eval(),
        specs=(parse_declaration("x:float32[n,8]"),),
        sizes=(),
        max_tokens=40,
        device="cpu",
        identity="test",
        args={},
        splitting_ops=(),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=observation is not None,
        policy=policy or Policy(),
    )
    traced = trace_all(model, request)
    witness = Witness(model, request, observation)
    witness.watch(traced)
    predicates = [
        predicate
        for item in traced
        for predicate in collect(
            item.trace.guards,
            model=model,
            local_scope=item.trace.local_scope,
            global_scope=item.trace.global_scope,
        ).predicates
    ]
    meanwhile()
    return witness.testify(traced, predicates, SALT)


def changed(seen: Evidence) -> list[str]:
    """What no longer holds of the inputs."""
    found = observed.changes(seen.inputs, salt=SALT, environ=os.environ, modules=sys.modules)
    return [record.name for record, _ in found]


def violated(seen: Evidence, model: nn.Module) -> list[str]:
    data = PredicateSet.of(seen.predicates).to_json()
    return [violation.path for violation in PredicateSet.from_json(data).check(model)]


Module = Callable[..., Any]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Write modules, import the first and return it: ``module("a body", helper="text")``."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def call(body: str, *, head: str = HEAD, name: str = "witness_model", **others: str) -> Any:
        for other, text in {**others, name: head + textwrap.dedent(body)}.items():
            (tmp_path / f"{other}.py").write_text(text)
            names.append(other)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield call
    for name in names:
        sys.modules.pop(name, None)


def forward(body: str, name: str = "M") -> str:
    return f"class {name}(Base):\n    def forward(self, x: torch.Tensor):\n" + textwrap.indent(body, " " * 8)


def variables(seen: Evidence) -> dict[str, str | None]:
    return {item.name: item.value for item in seen.inputs if item.kind == "environment"}


@pytest.mark.parametrize(
    "test",
    [
        "os.getenv('TOY_ACT') == 'gelu'",
        "os.environ.get('TOY_ACT') == 'gelu'",
        "'TOY_ACT' in os.environ and os.environ['TOY_ACT'] == 'gelu'",
        "os.environ.get('_'.join(['TOY', 'ACT'])) == 'gelu'",
    ],
)
def test_a_branch_on_a_variable_holds_for_its_value_only(
    module: Module, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    """Scenario 2: absent, present, computed; each value has an entry of its own."""
    model = module(forward(f"return self.linear(x).relu() if {test} else self.linear(x)")).M()
    monkeypatch.delenv("TOY_ACT", raising=False)
    without = see(model)
    monkeypatch.setenv("TOY_ACT", "gelu")
    with_it = see(model)
    assert variables(without) == {"TOY_ACT": None}
    assert variables(with_it) == {"TOY_ACT": "gelu"}
    assert changed(with_it) == []
    assert changed(without) == ["TOY_ACT"]
    monkeypatch.setenv("TOY_ACT", "relu")
    assert changed(with_it) == ["TOY_ACT"]
    monkeypatch.setenv("TOY_OTHER", "1")
    monkeypatch.setenv("TOY_ACT", "gelu")
    assert changed(with_it) == []


def test_two_values_make_two_entry_keys(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model = module(forward("return self.linear(x) * float(os.getenv('TOY_SCALE', '1'))")).M()
    keys = set()
    build = BuildFactors(environment={}, configuration={}, compiler={})
    traced = {"build observed": False, "model tree": "", "predicates": "", "programs": ""}
    for value in ("1", "2", "1"):
        monkeypatch.setenv("TOY_SCALE", value)
        seen = see(model)
        tree = build.tree(seen.sources, traced, seen.inputs)
        assert FactorTree.from_json(tree.to_json()) == tree
        assert build.matches(tree)  # what was seen is checked again, not asked for
        keys.add(entry_key(tree))
    assert len(keys) == 2


def test_the_rank_counts_when_the_models_own_code_reads_it(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario 18: a name that the declared table excludes."""
    model = module(forward("r = int(os.environ['RANK'])\nreturn self.linear(x)[:, r * 4 : (r + 1) * 4]")).M()
    monkeypatch.setenv("RANK", "0")
    seen = see(model)
    monkeypatch.setenv("RANK", "1")
    assert changed(seen) == ["RANK"]


def test_no_guard_keeps_a_value_of_the_environment(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_PASSWORD", "hunter2")
    model = module(forward("return self.linear(x) if os.environ['TOY_PASSWORD'] else x")).M()
    seen = see(model)
    text = (
        json.dumps([item.to_json() for item in seen.inputs])
        + PredicateSet.of(seen.predicates).to_json().decode()
    )
    assert "hunter2" not in text
    assert b"hunter2".hex() not in text
    assert "bytes_item" not in text
    assert "encodekey" not in text  # nor Python's own bookkeeping, which differs between its patch releases
    monkeypatch.setenv("TOY_PASSWORD", "another")
    assert changed(seen) == ["TOY_PASSWORD"]


@pytest.mark.parametrize("body", ["len([k for k in os.environ if k == 'TOY'])", "len(dict(os.environ))"])
def test_a_look_through_the_environment_is_refused_with_its_line(module: Module, body: str) -> None:
    model = module(forward(f"return self.linear(x) * {body}")).M()
    with pytest.raises(TraceError, match="whole environment") as caught:
        see(model)
    assert caught.value.where == "witness_model.py:13"
    seen = see(model, policy=Policy.of(include=["TOY"]))  # the site names what counts
    assert changed(seen) == []


def test_a_site_excludes_what_its_model_reads_for_a_log(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = module(forward("return self.linear(x) if os.getenv('TOY_LOG') else self.linear(x)")).M()
    assert variables(see(model)) == {"TOY_LOG": None}
    assert variables(see(model, policy=Policy.of(exclude=["TOY_*"]))) == {}


COMPUTED = """
name = 'TOY_' + ('A' if torch.compiler.is_compiling() else 'B')
if torch.compiler.is_compiling():
    return self.linear(x) if os.environ.get(name) else self.linear(x) + 1
return x
"""


def test_a_computed_name_that_the_eager_run_did_not_meet_is_refused(module: Module) -> None:
    model = module(forward(COMPUTED)).M()
    with pytest.raises(TraceError, match="computes the name of a variable") as caught:
        see(model)
    assert caught.value.where == "witness_model.py:16"


def test_the_environment_handed_to_a_function_is_followed_by_the_eager_run(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def act(env, y):\n    return y.relu() if env.get('TOY_ACT') else y\n" + forward(
        "return act(os.environ, self.linear(x))"
    )
    seen = see(module(text).M())
    assert variables(seen) == {"TOY_ACT": None}
    monkeypatch.setenv("TOY_ACT", "1")
    assert changed(seen) == ["TOY_ACT"]


FAILS = """
if not torch.compiler.is_compiling():
    self.left_behind = x
    raise ValueError('fakes')
return self.linear(x)
"""


def test_an_eager_run_that_fails_is_recorded_and_changes_nothing(module: Module) -> None:
    model = module(forward(FAILS)).M()
    seen = see(model)
    (note,) = [item for item in seen.inputs if item.kind == "note"]
    assert note.value == "not made: ValueError: fakes"
    assert not hasattr(model, "left_behind")


def test_the_eager_run_leaves_no_fake_tensor_behind(module: Module) -> None:
    text = """
    import functools
    @functools.lru_cache
    def table(n):
        return torch.ones(n)
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))
        def forward(self, x: torch.Tensor):
            if not torch.compiler.is_compiling():
                self.kept = x
                self.seen = self.seen + 1
            self.seen.add_(1)
            return self.linear(x) + table(8)
    """
    made = module(text)
    model = made.M()
    buffer = model.seen
    see(model)
    assert model.seen is buffer
    assert torch.equal(buffer, torch.zeros(8))  # neither the trace nor the run wrote it
    assert not hasattr(model, "kept")
    assert type(made.table(8)) is torch.Tensor


def test_a_probe_of_a_module_holds_until_it_appears(module: Module, tmp_path: Path) -> None:
    """Scenario 7."""
    text = forward("return self.linear(x) * (2 if importlib.util.find_spec('toy_fastmod') is not None else 1)")
    seen = see(module(text).M())
    assert changed(seen) == []
    (tmp_path / "toy_fastmod.py").write_text("")
    importlib.invalidate_caches()
    assert changed(seen) == ["toy_fastmod"]
    seen = see(sys.modules["witness_model"].M())
    assert changed(seen) == []
    (tmp_path / "toy_fastmod.py").unlink()
    importlib.invalidate_caches()
    assert changed(seen) == ["toy_fastmod"]


def test_files_are_not_traced_so_they_need_no_scan(module: Module) -> None:
    for body in ("f = open('a.json')\nreturn x", "return x * float(Path('a').read_text())"):
        model = module(forward(body)).M()
        with pytest.raises(TraceError):
            see(model)
        sys.modules.pop("witness_model")


def test_a_file_that_a_constant_result_reads_is_refused_with_it(module: Module, tmp_path: Path) -> None:
    """Scenario 15 f, for a file that is read while the model runs."""
    text = (
        "import torch._dynamo\n@torch._dynamo.assume_constant_result\ndef scale():\n"
        "    return json.loads((Path(__file__).parent / 'a.json').read_text())\n"
        + forward("return self.linear(x) * scale()")
    )
    (tmp_path / "a.json").write_text("2")
    with pytest.raises(UnsealableError, match="assume_constant_result"):  # nobody could tell when it changes
        see(module(text).M())


@pytest.mark.parametrize(
    ("body", "change"),
    [
        ("2 if self.linear.weight.requires_grad else 1", "requires_grad"),
        ("2 if 'flag' in self.__dict__ else 1", "flag"),
        ("2 if 'flag' in vars(self) else 1", "flag"),
        ("self.__dict__.get('flag', 1)", "flag"),
        ("2 if hasattr(self, 'flag') else 1", "flag"),
        ("getattr(self, 'flag', 1)", "flag"),
    ],
)
def test_what_dynamo_guards_not_becomes_a_predicate(module: Module, body: str, change: str) -> None:
    made = module(forward(f"return self.linear(x) * ({body})"))
    model = made.M().requires_grad_(False)
    seen = see(model)
    assert violated(seen, model) == []
    assert violated(seen, made.M().requires_grad_(False)) == []
    if change == "requires_grad":
        model.linear.weight.requires_grad_(True)
    else:
        model.flag = 3
    assert violated(seen, model)


def test_a_flag_of_its_own_is_compared_by_value(module: Module) -> None:
    made = module(forward("return self.linear(x) * self.__dict__['flag']"))
    model = made.M().requires_grad_(False)
    model.flag = 2
    seen = see(model)
    model.flag = 3
    assert violated(seen, model)


def test_a_branch_on_the_grad_mode_is_recorded(module: Module) -> None:
    seen = see(module(forward("return self.linear(x) * (2 if torch.is_grad_enabled() else 1)")).M())
    assert [(item.name, item.value) for item in seen.inputs if item.kind == "mode"] == [("grad", "off")]
    sys.modules.pop("witness_model")
    seen = see(module(forward("return self.linear(x)")).M())
    assert [item for item in seen.inputs if item.kind == "mode"] == []


def test_a_method_or_function_patched_in_the_process_is_noticed(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "def act(y):\n    return y.relu()\n"
        + forward("return act(self.scaled(x))")
        + "\n    @classmethod\n    def factor(cls):\n        return 2\n"
        + "    def scaled(self, x):\n        return self.linear(x) * self.factor()\n"
    )
    made = module(text)
    seen = see(made.M())
    assert changed(seen) == []
    for owner, name, new in (
        (made.M, "factor", classmethod(lambda cls: 3)),
        (made.M, "scaled", lambda self, x: x),
        (made, "act", lambda y: y),
        (nn.Linear, "forward", lambda self, x: x),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, new)
            assert changed(seen), name
        assert changed(seen) == []


def test_a_source_saved_after_its_import_is_refused(module: Module, tmp_path: Path) -> None:
    made = module(forward("return self.linear(x) * 2"))
    path = tmp_path / "witness_model.py"
    path.write_text(path.read_text().replace("* 2", "* 3"))
    with pytest.raises(TraceError, match=r"changed after witness_model was imported") as caught:
        see(made.M())
    assert "restart" in (caught.value.hint or "")
    path.write_text(path.read_text().replace("* 3", "* 2") + "\n# a comment does no harm\n")
    assert see(made.M()).sources


def test_what_changes_during_the_compile_is_refused(module: Module, tmp_path: Path) -> None:
    made = module(forward("return self.linear(x) if os.getenv('TOY_MEANWHILE') else x + self.linear(x)"))

    def set_variable() -> None:
        os.environ["TOY_MEANWHILE"] = "1"

    try:
        with pytest.raises(TraceError, match="TOY_MEANWHILE was changed while"):
            see(made.M(), meanwhile=set_variable)
    finally:
        os.environ.pop("TOY_MEANWHILE", None)
    path = tmp_path / "witness_model.py"
    text = path.read_text()
    with pytest.raises(TraceError, match="changed after witness_model was imported"):
        see(made.M(), meanwhile=lambda: path.write_text(text.replace("x + self", "x - self")))


def paths(seen: Evidence) -> set[str]:
    return {source.path for source in seen.sources}


def test_every_file_that_shapes_the_model_is_a_source(module: Module) -> None:
    """Scenario 15: a helper two calls deep, a base class, a decorator of two kinds, a constant's module."""
    made = module(
        "from w_first import first\nfrom w_base import Parent\nfrom w_deco import wrapping, registering\n"
        "import w_const\n"
        "class M(Parent):\n    @wrapping\n    @registering\n    def forward(self, x: torch.Tensor):\n"
        "        return first(self.scaled(self.linear(x))) * w_const.SCALE\n",
        w_first="from w_second import second\ndef first(y):\n    return second(y)\n",
        w_second="def second(y):\n    return y + 1\n",
        w_base=HEAD + "class Parent(Base):\n    def scaled(self, y):\n        return y * 2\n",
        w_deco=(
            "import functools\ndef wrapping(f):\n    @functools.wraps(f)\n    def inner(self, x):\n"
            "        return f(self, x) * 5\n    return inner\n"
            "def registering(f):\n    f.seen = True\n    return f\n"
        ),
        w_const="SCALE = 3\n",
    )
    model = made.M().requires_grad_(False)
    seen = see(model)
    assert paths(seen) >= {"witness_model.py", "w_first.py", "w_second.py", "w_base.py", "w_deco.py"}
    assert violated(seen, model) == []
    vars(sys.modules["w_const"])["SCALE"] = 4  # the constant of a module that is only imported
    assert violated(seen, model)


def test_code_without_a_file_is_keyed_by_its_content(module: Module) -> None:
    namespace: dict[str, Any] = {"__name__": "witness_exec"}
    made = type(sys)("witness_exec")
    sys.modules["witness_exec"] = made
    try:
        exec(HEAD + forward("return self.linear(x) * 2"), vars(made))
        seen = see(made.M())
        assert [source.kind for source in seen.sources if source.module == "witness_exec"] == ["code"]
        assert changed(seen) == []
        exec(forward("return self.linear(x) * 3"), vars(made))
        assert changed(seen) == ["M.forward"]
    finally:
        sys.modules.pop("witness_exec")
    assert namespace


def test_files_behind_a_custom_operator_are_sources(module: Module) -> None:
    made = module(
        "import w_op\n" + forward("return torch.ops.pwcc_witness.twice(self.linear(x)) + w_op.lib_twice(x)"),
        w_fake="import torch\ndef fake(x):\n    return torch.empty_like(x)\n",
        w_kernel="def kernel(x):\n    return x * 2\n",
        w_op=(
            "import torch, w_kernel, w_fake\n"
            "@torch.library.custom_op('pwcc_witness::twice', mutates_args=())\n"
            "def twice(x: torch.Tensor) -> torch.Tensor:\n    return w_kernel.kernel(x)\n"
            "twice.register_fake(w_fake.fake)\n"
            "L = torch.library.Library('pwcc_witness_lib', 'DEF')\n"
            "L.define('twice(Tensor x) -> Tensor')\nL.impl('twice', w_kernel.kernel, 'CPU')\n"
            "torch.library.register_fake('pwcc_witness_lib::twice', w_fake.fake, lib=L)\n"
            "def lib_twice(x):\n    return torch.ops.pwcc_witness_lib.twice(x)\n"
        ),
    )
    seen = see(made.M())
    assert paths(seen) >= {"witness_model.py", "w_op.py", "w_fake.py"}
    assert [item for item in seen.inputs if item.kind == "library"] == []  # no compiled library is behind them


def test_the_same_inputs_give_the_same_records(module: Module) -> None:
    model = module(forward("return self.linear(x) if os.getenv('TOY_B') and os.getenv('TOY_A') else x * 2")).M()
    assert see(model) == see(model)


def test_a_file_read_while_the_model_is_built_is_named_beside_its_module(tmp_path: Path) -> None:
    from pwcc.compile.model_ref import ModelRef, build

    (tmp_path / "witness_conf.json").write_text("[3]")
    (tmp_path / "witness_file.py").write_text(
        HEAD
        + "N = json.loads((Path(__file__).parent / 'witness_conf.json').read_text())\n"
        + forward("return self.linear(x) * 2")
    )
    built = build(ModelRef.parse(f"{tmp_path}/witness_file.py:M"), weights="random")
    seen = see(built.module, built.observation)
    records = {(item.kind, item.anchor, item.name) for item in seen.inputs}
    assert ("file", "module:witness_file", "witness_conf.json") in records
    assert str(tmp_path) not in json.dumps([item.to_json() for item in seen.inputs])
    (tmp_path / "witness_conf.json").write_text("[4]")
    assert changed(seen) == ["witness_conf.json"]
    assert seen.warnings == ()


def test_a_file_that_only_this_host_has_is_warned_of(tmp_path: Path, module: Module) -> None:
    observation = Observation()
    from pwcc.compile.observation import Reader

    far = tmp_path / "far.json"
    far.write_text("1")
    observation.places["file", str(far)] = (Reader("m.py:3", "nowhere", None), "/")
    observation.surveyed_by.add("settings")
    observation.rewritten["TOY"] = "m.py:4"
    observation.unkeyed.add("/proc/cpuinfo")
    seen = see(module(forward("return self.linear(x)")).M(), observation)
    assert len(seen.warnings) == 4
    assert any("far.json" in line for line in seen.warnings)
    assert functools.reduce(lambda a, b: a and b, (bool(line) for line in seen.warnings))
