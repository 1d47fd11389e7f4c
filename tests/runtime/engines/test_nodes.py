"""Engines that are further away: on two nodes, in another Python, or over two processes."""

import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from nemorl import GenerationConfig, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from tests.ray_session import ray_cpus
from tests.rollout.updates import update
from tests.runtime.engines.shared import small_model, vllm_backend
from tests.runtime.workers.nodes import printed
from tests.runtime.workers.processes import eventually
from tests.tiny_models import random_prompts, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow
def test_an_engine_whose_stages_are_on_different_nodes(tmp_path: Path):
    """It samples what one process does, also where weights change while requests are in flight."""
    seen = printed("tests.runtime.engines.far", tmp_path, timeout=400)
    assert seen["stages"] == seen["nodes"]
    assert seen["tokens"][0] == seen["tokens"][1]
    assert seen["proved"] > 0
    assert 0 < min(seen["old"]) <= max(seen["old"]) < 400


def backend_of(**options: Any) -> VLLMGenerationBackend:
    ray_cpus()
    backend = VLLMGenerationBackend(model=small_model(scale=3.0), tokenizer=tiny_tokenizer())
    engine = {"kv_cache_memory_bytes": 2**25, **options.pop("engine", {})}
    try:
        backend.setup(GenerationConfig(backend="vllm", num_replicas=1, engine=engine, **options))
    except BaseException:
        backend.shutdown()
        raise
    return backend


@pytest.mark.slow
def test_an_engine_in_another_environment(tmp_path: Path):
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    (packages / "driver.pth").write_text(sysconfig.get_path("purelib") + "\n")
    started = tmp_path / "started"
    (packages / "sitecustomize.py").write_text(
        f"import os\nprint(os.getpid(), file=open({str(started)!r}, 'a'))\n"
    )
    params = SamplingParams(max_new_tokens=12, n=2, seed=3)
    expected = vllm_backend(small_model(scale=3.0)).generate(random_prompts(4), params)
    backend = backend_of(python=str(tmp_path / "env" / "bin" / "python"))
    try:
        assert backend.generate(random_prompts(4), params) == expected
        pid = backend._engines.running()[0].place.pid
        assert str(pid) in started.read_text().split()
    finally:
        backend.shutdown()


@pytest.mark.slow
def test_a_replica_that_splits_the_model(tmp_path: Path):
    """Over two processes, which write to its log and share memory without a name."""
    before = set(Path("/dev/shm").iterdir())
    prompts, params = random_prompts(4), SamplingParams(max_new_tokens=8, temperature=0.0)
    backend = backend_of(tensor_parallel_size=2, log_dir=str(tmp_path))
    try:
        assert set(Path("/dev/shm").iterdir()) <= before
        for version in (0, 1):
            model = small_model(seed=version, scale=3.0)
            update(backend, list(model.named_parameters()), version)
            embedded = TorchGenerationBackend(model=model, tokenizer=tiny_tokenizer())
            embedded.setup(GenerationConfig())
            expected = [c.token_ids for c in embedded.generate(prompts, params)]
            assert [c.token_ids for c in backend.generate(prompts, params)] == expected
    finally:
        backend.shutdown()
    assert eventually(lambda: set(Path("/dev/shm").iterdir()) <= before)
    log = (tmp_path / "replica-0.log").read_text()
    assert "Worker_TP1" in log and "FileNotFoundError" not in log and "leaked" not in log
    assert len(log.splitlines()) < 300


@pytest.mark.slow
def test_a_process_of_the_engines_that_cannot_start_says_why():
    """Its reason is in the log alone: what vLLM raises refers to "the stack trace"."""
    before = set(Path("/dev/shm").glob("psm_*"))
    with pytest.raises(
        ValueError,
        match=r"^ModuleNotFoundError: No module named 'no' .so the vLLM engine could not start",
    ):
        backend_of(tensor_parallel_size=2, engine={"worker_cls": "no.such.Worker"})
    assert set(Path("/dev/shm").glob("psm_*")) <= before
