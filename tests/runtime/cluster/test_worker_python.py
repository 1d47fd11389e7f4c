"""Interpreters of workers: environments whose versions differ from the driver's, those that can't
serve, and those that are built and kept.
"""

import re
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from nemorl.runtime.cluster import worker_python
from nemorl.runtime.cluster.worker_python import (
    check_python,
    environment,
    requirements_of,
    resolve_python,
)
from tests.runtime.cluster.targets import __name__ as targets

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def isolated(folder: Path, *, shared: bool = True, **packages: str) -> str:
    """An environment that has these versions of packages, and the driver's of all others after its
    own.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    if shared:
        (site / "driver.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    for name, number in packages.items():
        (site / f"{name}.py").write_text(f"__version__ = {number!r}\n", encoding="utf-8")
        info = site / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n", encoding="utf-8"
        )
        (info / "top_level.txt").write_text(f"{name}\n", encoding="utf-8")
    return str(folder / "bin" / "python")


def test_a_worker_runs_in_its_own_environment_with_the_drivers_nemorl(
    workers, tmp_path: Path, cache: Path
):
    python = isolated(tmp_path / "env", einops="99.1")
    assert check_python(python, {"einops": ">=99,<100", "numpy": None}) == {
        "einops": "99.1",
        "numpy": version("numpy"),
        "ray": version("ray"),
    }
    group = workers(1, f"{targets}:Target", python=resolve_python(python))
    executable, package, einops, ray = group.run_rank_zero("versions", "einops", "ray")
    assert (executable, einops, ray) == (python, "99.1", version("ray")) and version(
        "einops"
    ) != "99.1"
    assert Path(package).resolve() == Path(worker_python.__file__).parents[2].resolve()
    [path] = group.run_rank_zero("environment", "PYTHONPATH").values()
    assert [entry.name for entry in Path(path).iterdir()] == ["nemorl"], (
        "and nothing else of the driver's"
    )


def test_what_is_missing_or_out_of_range_is_listed_at_once(tmp_path: Path):
    python = isolated(tmp_path / "env", shared=False, einops="0.5")
    with pytest.raises(ValueError) as caught:
        check_python(
            python,
            {"einops": ">=0.8", "vllm": ">=0.32,<0.34", "torch": None},
            field="generation.python",
        )
    assert (
        str(caught.value)
        == f"generation.python must be an interpreter that can run the workers, but {python} can't,"
        " since einops is 0.5, where >=0.8 is needed; vllm is missing, where >=0.32,<0.34 is"
        f" needed; torch is missing; ray is missing, where =={version('ray')} is needed:"
        f" {python} -m pip install 'einops>=0.8' 'vllm>=0.32,<0.34' 'torch'"
        f" 'ray=={version('ray')}'"
    )


def test_another_version_of_ray_or_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = isolated(tmp_path / "env", ray="2.1.0")
    with pytest.raises(
        ValueError,
        match=(
            rf"ray is 2.1.0, where =={version('ray')} is needed: .*env/bin/python -m pip install"
            r" 'ray=="
        ),
    ):
        check_python(python, {})
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    monkeypatch.setattr(worker_python, "version", lambda name: "2.1.0")
    with pytest.raises(
        ValueError,
        match=r"it is Python 3.\d+, where 3.99 is needed, the driver's: name another one",
    ):
        check_python(python, {})


def test_paths(tmp_path: Path):
    assert resolve_python(None) is None and resolve_python(sys.executable) == sys.executable
    with pytest.raises(
        ValueError, match=r"generation\.python must be an interpreter, but it is '/no/python'"
    ):
        resolve_python("/no/python", field="generation.python")
    with pytest.raises(ValueError, match="python must be an interpreter, but it is"):
        resolve_python(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"python must name one of nemorl's extras \(.*vllm.*\), but it is 'extra:vlm'",
    ):
        resolve_python("extra:vlm")
    with pytest.raises(ValueError, match="can't run a line of Python"):
        check_python("/bin/false", {})


def test_requirements_of_an_extra_are_nemorls_and_the_extras_with_the_drivers_ray():
    found = requirements_of("vllm")
    names = {re.split("[<>=~!]", line)[0] for line in found}
    assert (
        {"torch", "transformers", "vllm", "ray"} <= names
        and "pytest" not in names
        and f"ray=={version('ray')}" in found
    )
    assert {"tensorboard", "pytest"} <= {
        re.split("[<>=~!]", line)[0] for line in requirements_of("dev")
    }, "extras of extras"


def wheel(folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "tinything-1.5-py3-none-any.whl", "w") as file:
        info = "tinything-1.5.dist-info"
        file.writestr("tinything.py", "answer = 42\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.5\n")
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(
            f"{info}/RECORD",
            f"tinything.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )


def test_an_environment_is_built_once_and_removed_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, capfd
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(
        ValueError,
        match=(
            r"the environment for vllm can't be built, as told above: `.*pip install"
            r" .*tinything==1.5` failed"
        ),
    ):
        environment("vllm", ["tinything==1.5"])
    assert "No matching distribution" in capfd.readouterr().err
    assert [path.suffix for path in (cache / "environments").iterdir()] == [".lock"], (
        "nothing is left of it"
    )

    wheel(tmp_path / "wheels")
    monkeypatch.setattr(worker_python, "requirements_of", lambda extra: ["tinything==1.5"])
    python = resolve_python("extra:vllm")
    assert (
        python is not None
        and Path(python).is_relative_to(cache)
        and "is built in" in capfd.readouterr().err
    )
    with pytest.raises(ValueError, match="since ray is missing"):
        check_python(python, {"tinything": "==1.5"})
    assert resolve_python("extra:vllm") == python and capfd.readouterr().err == ""
    assert environment("vllm", ["tinything==1.5"]).exists() and environment(
        "vllm", ["tinything==1.5"]
    ) == Path(python)
