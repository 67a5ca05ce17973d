import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pwcc.cache.errors import ModelError, UsageError
from pwcc.compile.model_args import convert_args, load_args_file, parse_args
from pwcc.compile.model_ref import ModelKind, ModelRef, build
from pwcc.compile.models.llama import Llama
from pwcc.compile.user_code import import_file
from pwcc.compile.weights import materialize, parameters_on_meta

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_decoder.py"

USER_FILE = """\
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self, width: int = 4, factor: float = 1.0, *, name: str = "x"):
        super().__init__()
        if factor < 0:
            raise ArithmeticError(f"negative factor {factor}")
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.arange(width, dtype=torch.float32) * factor, persistent=False)
        self.plain = torch.full((width,), 3.0)
        self.name = name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(hidden)) + self.table + self.plain

    def example_inputs(self, num_tokens):
        return (torch.zeros(num_tokens, self.a.in_features),)

instance = Scale()
number = 3
def not_a_module(): return 5
def reads_values():
    m = Scale(); m.bound = m.a.weight.max().item(); return m
def typeless(width): return Scale(width)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "scale_model.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize(
    ("text", "kind", "location", "attr"),
    [
        ("llama-tiny", ModelKind.BUILTIN, "llama-tiny", None),
        ("some.package:Thing.make", ModelKind.MODULE, "some.package", "Thing.make"),
        (f"{EXAMPLE}:factory", ModelKind.FILE, str(EXAMPLE), "factory"),
        ("org/name-1.5B", ModelKind.HF_HUB, "org/name-1.5B", None),
    ],
)
def test_forms(text: str, kind: ModelKind, location: str, attr: str | None) -> None:
    assert ModelRef.parse(text) == ModelRef(kind, location, attr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama-tniy", "did you mean llama-tiny"),
        ("nonsense", "llama-8b"),
        ("nonsense", "package.module:attr"),
        ("no/such/file.py:attr", "no such file: 'no/such/file.py'"),
        (str(EXAMPLE), "names a file but nothing in it"),
        (f"{EXAMPLE}:", "attribute name after the colon"),
        (str(EXAMPLE.parent), "has no config.json"),
        ("", "unknown model ''"),
    ],
)
def test_unknown_models_say_what_is_accepted(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ModelRef.parse(text)
    assert said in str(caught.value)


def test_builtin_with_arguments() -> None:
    built = build(
        ModelRef.parse("llama-tiny"), args=parse_args(["layers=2", "eps=1", "tied=true"]), weights="random"
    )
    assert built.identity == "builtin:llama-tiny"
    assert built.args == {"layers": 2, "eps": 1.0, "tied": True}
    assert built.config["hidden"] == 128
    assert isinstance(built.module, Llama)
    assert built.module.lm_head.weight is built.module.embed.weight
    assert not built.module.training
    assert not any(p.requires_grad for p in built.module.parameters())
    built.module(torch.arange(3), torch.arange(3))
    with pytest.raises(UsageError, match="divisible by kv_heads"):
        build(ModelRef.parse("llama-tiny"), args={"kv_heads": 3})
    with pytest.raises(UsageError, match="no parameter 'layer'") as caught:
        build(ModelRef.parse("llama-tiny"), args={"layer": 3})
    assert "layers" in str(caught.value)


def test_none_then_materialize_equals_random() -> None:
    ref = ModelRef.parse("llama-tiny")
    bare = build(ref, weights="none", dtype="bfloat16").module
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    materialize(bare, device="cpu", seed=3)
    ready = build(ref, weights="random", dtype="bfloat16", seed=3).module
    assert {p.dtype for p in ready.parameters()} == {torch.bfloat16}
    for (name, a), (_, b) in zip(bare.named_parameters(), ready.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.get_default_dtype() is torch.float32


def test_example_file() -> None:
    built = build(ModelRef.parse(f"{EXAMPLE}:factory"), args={"layers": 1}, weights="random")
    assert built.identity == "file:tiny_decoder.py:factory"
    assert built.args == {"layers": 1}
    assert built.example_inputs is not None
    examples = built.example_inputs(5)
    assert isinstance(examples, tuple)
    assert built.module(*examples).shape == (5, 512)


def test_without_weights_buffers_attributes_and_ties_are_kept(user_file: Path) -> None:
    built = build(ModelRef.parse(f"{user_file}:Scale"), args={"factor": 2}, weights="none")
    module = built.module
    assert built.args == {"factor": 2.0}
    assert module.a.weight.is_meta  # type: ignore[union-attr]
    assert module.a.weight is module.b.weight  # type: ignore[union-attr]
    assert module.get_buffer("table").tolist() == [0.0, 2.0, 4.0, 6.0]
    materialize(module, device="cpu", seed=0)
    assert module.a.weight is module.b.weight  # type: ignore[union-attr]
    assert module(torch.zeros(2, 4)).isfinite().all()
    assert built.example_inputs is not None


def test_a_buffer_without_value_cannot_be_materialized(user_file: Path) -> None:
    scale = import_file(user_file).Scale
    with torch.device("meta"):
        module = scale()
    with pytest.raises(ModelError, match="buffer 'table' has no value"):
        materialize(module, device="cpu", seed=0)


def test_one_parameter_registered_twice_stays_one() -> None:
    with parameters_on_meta():
        shared = nn.Parameter(torch.ones(3))
        a, b = nn.Module(), nn.Module()
        a.w, b.w = shared, shared
        lazy = nn.LazyLinear(2)
    assert a.w is b.w
    assert a.w.is_meta
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # the hook is gone
    assert not lazy.weight.is_meta


def test_instances_keep_their_weights_and_take_no_arguments(user_file: Path) -> None:
    ref = ModelRef.parse(f"{user_file}:instance")
    built = build(ref, weights="none")
    assert built.weights == "real"
    assert built.identity == "file:scale_model.py:instance"
    assert built.module is import_file(user_file).instance
    assert not built.module.get_parameter("a.weight").is_meta
    with pytest.raises(UsageError, match="takes no arguments"):
        build(ref, args={"width": 2})


@pytest.mark.parametrize(
    ("attr", "args", "said"),
    [
        ("number", {}, "is a int, expected an nn.Module class"),
        ("torch", {}, "is a module, expected"),
        ("not_a_module", {}, "returned a int"),
        ("Scal", {}, "did you mean Scale"),
        ("Scale", {"width": "four"}, "expects width to be int, got 'four' (str)"),
        ("Scale", {"widht": 4}, "did you mean width"),
        ("typeless", {}, "needs a value for 'width'"),
    ],
)
def test_what_is_no_model_and_bad_arguments(
    user_file: Path, attr: str, args: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build(ModelRef.parse(f"{user_file}:{attr}"), args=args)
    assert said in str(caught.value)


def test_a_raising_factory_names_the_users_line(user_file: Path) -> None:
    with pytest.raises(ModelError) as caught:
        build(ModelRef.parse(f"{user_file}:Scale"), args={"factor": -1.0})
    line = 1 + USER_FILE.splitlines().index('            raise ArithmeticError(f"negative factor {factor}")')
    assert "ArithmeticError: negative factor -1.0" in str(caught.value)
    assert caught.value.where == f"{user_file}:{line}"
    with pytest.raises(ModelError, match="ZeroDivisionError") as caught:
        build(ModelRef.parse(f"{EXAMPLE}:factory"), args={"heads": 0})
    assert caught.value.where is not None
    assert "tiny_decoder.py:" in caught.value.where
    with pytest.raises(ModelError, match="weights real") as caught:
        build(ModelRef.parse(f"{user_file}:reads_values"))
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(user_file))
    assert build(ModelRef.parse(f"{user_file}:reads_values"), weights="real").module is not None


@pytest.mark.parametrize(
    ("source", "said", "line"),
    [
        ("x = 1\ny = (", "SyntaxError", 2),
        ("\n\nimport no_such_thing_here", "no_such_thing_here", 3),
        ("1/0", "Zero", 1),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, source: str, said: str, line: int) -> None:
    path = tmp_path / "broken_model.py"
    path.write_text(source)
    with pytest.raises(ModelError, match=said) as caught:
        build(ModelRef.parse(f"{path}:anything"))
    assert caught.value.where == f"{path}:{line}"
    assert "broken_model" not in sys.modules


def test_files_of_one_stem_do_not_collide_and_edits_are_seen(tmp_path: Path) -> None:
    paths = [tmp_path / side / "same_stem.py" for side in ("a", "b")]
    for value, path in enumerate(paths):
        path.parent.mkdir()
        (path.parent / "sibling_of_same_stem.py").write_text("")
        path.write_text(f"import sibling_of_same_stem\nvalue = {value}")
    first, second = (import_file(path) for path in paths)
    assert (first.value, second.value) == (0, 1)
    assert first.__name__ == "same_stem"
    assert second.__name__ == "pwcc_user.same_stem"
    assert sys.modules[first.__name__] is first
    assert sys.modules[second.__name__] is second
    assert import_file(paths[0]) is first
    paths[0].write_text("value = 10")
    assert import_file(paths[0]).value == 10
    assert str(tmp_path) not in " ".join(sys.path)


def test_modules_are_also_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pwcc_test_pkg").mkdir()
    (tmp_path / "pwcc_test_pkg" / "__init__.py").write_text("")
    (tmp_path / "pwcc_test_pkg" / "nets.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    built = build(ModelRef.parse("pwcc_test_pkg.nets:Scale"), weights="random")
    assert built.identity == "pwcc_test_pkg.nets:Scale"
    with pytest.raises(UsageError, match=r"no module named 'pwcc_test_pkg\.net'"):
        build(ModelRef.parse("pwcc_test_pkg.net:Scale"))
    with pytest.raises(ModelError) as caught:
        build(ModelRef.parse("pwcc_test_pkg.nets:Scale"), args={"factor": -1})
    assert caught.value.where is not None
    assert caught.value.where.startswith("pwcc_test_pkg/nets.py:")


def test_parse_args() -> None:
    pairs = [
        "layers=4",
        "eps=1e-5",
        "tied=true",
        "off=False",
        "none=None",
        "name=abc",
        'quoted="4"',
        "list=[1,2]",
        "e=a=b",
    ]
    assert parse_args(pairs) == {
        "layers": 4,
        "eps": 1e-5,
        "tied": True,
        "off": False,
        "none": None,
        "name": "abc",
        "quoted": "4",
        "list": [1, 2],
        "e": "a=b",
    }
    assert isinstance(parse_args(["a=NaN"])["a"], str)
    for bad in (["layers"], ["=3"], ["a b=3"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--arg"):
            parse_args(bad)


def test_args_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"layers": 2}')
    (tmp_path / "a.toml").write_text("layers = 2\neps = 1e-6")
    assert load_args_file(tmp_path / "a.json") == {"layers": 2}
    assert load_args_file(tmp_path / "a.toml") == {"layers": 2, "eps": 1e-6}
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "worse.toml").write_text("layers =")
    for name, said in [
        ("bad.json", "table of argument names"),
        ("worse.toml", "does not parse"),
        ("no.json", "cannot read"),
        ("a.yaml", "ending in .json or .toml"),
    ]:
        with pytest.raises(UsageError, match=said):
            load_args_file(tmp_path / name)


def test_values_are_fitted_to_annotations() -> None:
    def target(  # type: ignore[no-untyped-def]
        a: int = 0,
        b: float = 0.0,
        c: str | None = None,
        d: tuple[int, ...] = (),
        e: torch.dtype = torch.float32,
        f: list[float] | None = None,
        g: bool = False,
        h=None,
        i: "str | int" = 0,
        j: Path = Path(),
        **more: int,
    ) -> None: ...

    given: dict[str, object] = {
        "b": 3,
        "c": 4,
        "d": [1, 2],
        "e": "bfloat16",
        "f": [1],
        "h": [3],
        "i": 5,
        "j": "x",
        "k": 1,
    }
    fitted = convert_args(target, given, what="target")
    assert fitted == {
        "b": 3.0, "c": "4", "d": (1, 2), "e": torch.bfloat16, "f": [1.0],
        "h": [3], "i": 5, "j": Path("x"), "k": 1
    }  # fmt: skip
    assert isinstance(fitted["b"], float)
    wrong: list[dict[str, object]] = [
        {"a": 1.5},
        {"a": True},
        {"b": "x"},
        {"d": ["x"]},
        {"e": "float99"},
        {"g": 1},
    ]
    for args in wrong:
        with pytest.raises(UsageError):
            convert_args(target, args, what="target")
