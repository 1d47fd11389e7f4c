"""Runtime shape checks for the whole package, Hypothesis profiles, and what every test shares."""

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

import tests.shape_checks  # noqa: F401  (the hook looks it up by name)
from tests import allowance
from tests.forked import forked_python
from tests.ray_session import end_ray, is_of_ray

# A name that is no folder is refused at once, with or without a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests read vLLM's messages. TRL, which other tests import, would turn them off.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
# Shells start background jobs with SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

_early = sorted(name for name in sys.modules if name.split(".")[0] == "nemorl")
if _early:
    raise RuntimeError(
        f"nemorl was imported before the tests turned on its shape checks ({_early[0]}): import it"
        " in test modules only"
    )
# The package's annotations, of shapes and plain types, are checked in every call.
install_import_hook("nemorl", "tests.shape_checks.check")

import nemorl  # noqa: E402, F401  (before torch: see nemorl.openmp)

# isort: split
import torch  # noqa: E402  (after the hook, so that nothing can slip in before it)

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:  # where pinned memory is CUDA's
    # Before the first backward pass, in which autograd asks for devices.
    from tests.emulated_gpu import NAME, emulated

torch.set_num_threads(1)  # the tensors are tiny: threads only cost time

# `make test` runs 20 examples a law, `make test-all` 200 (HYPOTHESIS_PROFILE=thorough).
for _name, _examples in {"ci": 20, "thorough": 200}.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
        database=None,
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SLOW_TIMEOUT_S = 1800
HAS_VLLM = find_spec("vllm") is not None
collect_ignore_glob = ["clients/*"]  # programs, for packages that are not here
collect_ignore_glob += ["runtime/engines/*"] * (not HAS_VLLM) + ["test_emulated_gpu.py"] * ON_CUDA
# Of the packages that only slow tests need (the extra "slow").
NEEDING = {"mlflow": "test_mlflow.py", "wandb": "test_wandb.py", "bitsandbytes": "test_qlora.py"}
collect_ignore_glob += [f"*/{file}" for name, file in NEEDING.items() if find_spec(name) is None]


def pytest_configure(config: pytest.Config) -> None:
    """Count the CPU time of every test, those in docstrings of nemorl/ included."""
    config.pluginmanager.register(allowance)


def slow_case(item: pytest.Item) -> bool:
    """Return whether `slow_cases("id")` names this case, or `slow_cases(but=["id"])` does not."""
    mark = item.get_closest_marker("slow_cases")
    if mark is None:
        return False
    case = item.callspec.id  # type: ignore[attr-defined]
    return case not in mark.kwargs["but"] if mark.kwargs else case in mark.args


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a GPU or vLLM where there is none; begin with what must run on one worker."""
    for item in items:
        if slow_case(item):
            item.add_marker(pytest.mark.slow)
        # By marker, not by keyword: a parameter may be called gpu, too.
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if ("vllm" in item.nodeid or "runtime/engines" in item.nodeid) and not HAS_VLLM:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        if "accelerator" in getattr(item, "fixturenames", ()):
            # Once torch has the emulated device it keeps it: in one of the test processes.
            item.add_marker(pytest.mark.xdist_group("emulated"))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(scope="session")
def forked() -> Iterator[Path]:
    """A folder with a `python` and a `nemorl` that start at once (see tests/forked.py)."""
    with forked_python() as folder:
        yield folder


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU, and the emulated one that stands in for it on any machine."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    if ON_CUDA:
        pytest.skip("stands in for a GPU where there is none")
    with emulated():
        yield torch.device(NAME)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """No test depends on the one before it."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Ray with the last test that needs it, once its fixtures are gone."""
    if is_of_ray(item) and not is_of_ray(nextitem):
        end_ray()
