"""About 25 changes that must not matter: each is a hit, for a load and for a compile."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pwcc
from tests.conftest import REPOSITORY, Machine
from tests.key import project
from tests.key.conftest import TAG, Keyed, model_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]

ELSEWHERE = "/nonexistent/elsewhere"
VARIABLES = {
    "HOME": ELSEWHERE,
    "XDG_CACHE_HOME": ELSEWHERE,
    "XDG_CONFIG_HOME": ELSEWHERE,
    "XDG_RUNTIME_DIR": ELSEWHERE,
    "TMPDIR": ELSEWHERE,
    "USER": "geppetto",
    "LOGNAME": "geppetto",
    "HOSTNAME": "pod-7f9c",
    "PORT": "8123",
    "MASTER_ADDR": "10.0.0.3",
    "MASTER_PORT": "29511",
    "POD_IP": "10.1.2.3",
    "POD_NAME": "server-0",
    "VLLM_HOST_IP": "10.1.2.3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "3",
    "PWD": ELSEWHERE,
    "OLDPWD": ELSEWHERE,
    "TERM": "vt100",
    "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22",
    "SSH_AUTH_SOCK": ELSEWHERE,
    "WORKER_ID": "17",
    "RANDOM_RUN": uuid.UUID(int=7).hex,
    "CUDA_VISIBLE_DEVICES": "0",
    "TORCHINDUCTOR_CACHE_DIR": ELSEWHERE,
    "TRITON_CACHE_DIR": ELSEWHERE,
    "TORCH_LOGS": "+dynamo",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PYTHONPATH": ELSEWHERE,
    "VIRTUAL_ENV": ELSEWHERE,
}


def require_hit(keyed: Keyed, model: nn.Module, cache: Path | None = None) -> None:
    assert keyed.load(model, cache).manifest.entry_key == keyed.entry
    assert keyed.recompile(model, cache).entry_key == keyed.entry


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_says_only_where_or_who(
    keyed: Keyed, model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, VARIABLES[name])
    require_hit(keyed, model)


def test_another_working_directory(
    keyed: Keyed, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_hit(keyed, model)


def apply(module: ModuleType, model: Any, name: str) -> None:
    """Change something that no compiled code depends on."""
    if name == "an attribute used for logging only":
        model.run_id = uuid.uuid4().hex
        model.started = 0.0
    elif name == "a new attribute":
        model.note = "of no use"
    elif name == "a logger":
        model.log = logging.getLogger("another")
    elif name == "a function that is not called":
        module.unrelated = lambda: 1  # type: ignore[attr-defined]
    elif name == "a global that is not read":
        module.UNUSED = 4  # type: ignore[attr-defined]
    elif name == "a further entry of a table":
        module.ACTS["gelu"] = torch.nn.functional.gelu
    elif name == "weights":
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    elif name == "gradients":
        model.requires_grad_(True)
    elif name == "threads":
        torch.set_num_threads(1)
    elif name == "seed":
        torch.manual_seed(99)
        random.seed(99)


@pytest.mark.parametrize(
    "name",
    [
        "an attribute used for logging only",
        "a new attribute",
        "a logger",
        "a function that is not called",
        "a global that is not read",
        "a further entry of a table",
        "weights",
        "gradients",
        "threads",
        "seed",
    ],
)
def test_a_change_that_no_code_depends_on(keyed: Keyed, module: ModuleType, name: str) -> None:
    model = model_of(module)
    before = torch.get_num_threads()
    try:
        apply(module, model, name)
        require_hit(keyed, model)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(keyed: Keyed, model: nn.Module, mode: Callable[[], Any]) -> None:
    with mode():
        require_hit(keyed, model)


def test_other_modules_in_another_order(keyed: Keyed) -> None:
    with project.imported(keyed.root):
        pass
    sys.path.insert(0, str(keyed.root))
    try:
        for name in ("keyed_unrelated", "farther.inner", "keyed_deco", "keyed_consts"):
            __import__(name)
        require_hit(keyed, model_of(__import__("keyed_model")))
    finally:
        sys.path.remove(str(keyed.root))
        project.forget()


def test_an_unrelated_edit_and_another_checkout(keyed: Keyed, tmp_path: Path) -> None:
    root = tmp_path / "another" / "checkout"
    shutil.copytree(keyed.root, root)
    project.edit(root, "keyed_unrelated.py", "1", "2")
    (root / "NOTES.txt").write_text("new")
    with project.imported(root) as module:
        require_hit(keyed, model_of(module))


def test_another_cache_in_use_at_the_same_time(keyed: Keyed, model: nn.Module, tmp_path: Path) -> None:
    copy = keyed.warm.copy(tmp_path / "copy")
    assert keyed.load(model).manifest == keyed.load(model, copy).manifest


def test_hook_ids_of_the_process_do_not_matter(keyed: Keyed, model: nn.Module) -> None:
    for _ in range(3):
        nn.Identity().register_forward_hook(lambda *_: None)
    require_hit(keyed, model)


# In processes of their own


SERVE = """
import json, os, sys, time
before = time.perf_counter()
if {torch_first}:
    import torch
import pwcc
import keyed_model, torch
torch.manual_seed(0)
model = keyed_model.Tiny().eval()
compiled = pwcc.load(model, cache_dir={cache!r}, tag={tag!r})
x = torch.linspace(-1, 1, 24).view(3, 8)
same = torch.allclose(compiled(x), model(x).detach(), atol=1e-6)
print(json.dumps([compiled.manifest.entry_key, compiled.receipt.is_clean, same, pwcc.__file__]))
"""


def serve(keyed: Keyed, root: Path, number: int, cache: Path, **env: str) -> list[Any]:
    """Serve from another user's machine, project and Python path; returns what it printed."""
    machine = Machine.make(root / f"machine-{number}", f"user{number}", bare=True)
    place = root / f"site-{number}" / "deep" / "project"
    shutil.copytree(keyed.root, place)
    script = SERVE.format(cache=str(cache), tag=TAG, torch_first=bool(number % 2))
    path = os.pathsep.join([str(place), *([env.pop("PYTHONPATH")] if "PYTHONPATH" in env else [])])
    noise = {"PYTHONPATH": path, "PYTHONHASHSEED": str(number * 7919), "RUN": uuid.uuid4().hex, **env}
    settings = [f"{name}={value}" for name, value in noise.items()]
    done = machine.run("-B", "-c", script, through=["/usr/bin/env", *settings])
    found: list[Any] = json.loads(done.stdout)
    return found


def copy_of_pwcc(root: Path) -> Path:
    """Install pwcc's files into another directory, as another virtual environment has them."""
    package = root / "site-packages" / "pwcc"
    package.mkdir(parents=True)
    for name in ("cache", "compile", "capture", "cli"):
        shutil.copytree(REPOSITORY / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (REPOSITORY / "src/pwcc").glob("*.py"):
        shutil.copy(path, package)
    return package.parent


def test_fresh_processes_of_other_users_hit(keyed: Keyed, tmp_path: Path) -> None:
    """Another HOME, cwd, user, hash seed, checkout, import order, cache path and place of pwcc itself."""
    site = copy_of_pwcc(tmp_path)
    for number in range(4):
        cache = keyed.warm.copy(tmp_path / f"moved-{number}" / "cache")
        env = {"PYTHONPATH": str(site)} if number == 3 else {}
        entry, clean, same, place = serve(keyed, tmp_path, number, cache, **env)
        assert (entry, clean, same) == (keyed.entry, True, True)
        assert (number == 3) == place.startswith(str(site))


def test_another_path_to_the_virtual_environment(keyed: Keyed, tmp_path: Path) -> None:
    """Through a link: the interpreter, its prefix and every installed file have other names."""
    link = tmp_path / "venv-of-another-user"
    link.symlink_to(Path(sys.prefix))
    machine = Machine.make(tmp_path / "machine", "another")
    script = SERVE.format(cache=str(keyed.cache), tag=TAG, torch_first=True)
    script = f"import sys; assert sys.prefix == {str(link)!r}, sys.prefix\n" + script
    through = [str(link / "bin" / "python"), "-B", "-c", script]
    done = machine.run(through=["/usr/bin/env", *through], PYTHONPATH=str(keyed.root))
    entry, clean, same, _ = json.loads(done.stdout)
    assert (entry, clean, same) == (keyed.entry, True, True)


RELOCATIONS = 100


def test_a_hundred_relocations_hit(keyed: Keyed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry moved 100 times, each time under another path, user, project and environment.

    In this process; benchmarks/relocations.py does the same with a process each.
    """
    draw = random.Random(20251129)
    cache = keyed.warm.copy(tmp_path / "cache")
    project_root = tmp_path / "project"
    shutil.copytree(keyed.root, project_root)
    monkeypatch.chdir(tmp_path)
    hits = 0
    for number in range(RELOCATIONS):
        place = tmp_path / "".join(draw.choices("abcxyz-_ .", k=draw.randint(3, 40))).strip(" .") / str(number)
        place.mkdir(parents=True, exist_ok=True)
        cache = cache.rename(place / "cache")
        project_root = project_root.rename(place / "project")
        monkeypatch.chdir(place)
        for name in draw.sample(sorted(VARIABLES), 6):
            monkeypatch.setenv(name, f"{place}/{draw.random()}")
        monkeypatch.setenv(f"NOISE_{draw.randrange(10**9)}", uuid.uuid4().hex)
        with project.imported(project_root) as module:
            compiled = pwcc.load(model_of(module), cache_dir=cache, tag=TAG)
        hits += compiled.manifest.entry_key == keyed.entry
    assert hits == RELOCATIONS
