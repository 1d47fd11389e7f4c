"""Engines that are further away: on another node than the trainer, or in another Python
environment; and what does not fit anywhere.
"""

import importlib.metadata
import shutil
import sysconfig
import venv
from pathlib import Path
from typing import Any

import einops
import pytest

import nemorl
from nemorl import GenerationConfig, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.engines.backend import VLLMGenerationBackend
from tests.ray_session import NUM_CPUS, ray_cpus
from tests.rollout.updates import update
from tests.runtime.cluster.nodes import printed
from tests.runtime.engines.shared import vllm_backend
from tests.runtime.engines.toys import eventually
from tests.runtime.runs import addition_rows
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("ray")

SIZES = {"hidden_size": 128, "head_dim": 32, "scale": 3.0}


@pytest.mark.slow
def test_engines_get_the_gpus_of_a_cluster_that_the_loops_machine_lacks(tmp_path: Path):
    assert printed("tests.runtime.engines.far", tmp_path, "gpus", timeout=300) == {
        **{"on_gpus": True, "sleep_level": 2},
        **{"gpus": [["0"], ["1"]], "second": [True, True]},
    }


@pytest.mark.slow
def test_an_engine_whose_stages_are_on_different_nodes(tmp_path: Path):
    """It samples what one process does, and tokens are of the weights that they name where these
    change while requests are in flight: vLLM drops what stages have under way then.
    """
    seen = printed("tests.runtime.engines.far", tmp_path, "stages", timeout=400)
    assert seen["stages"] == seen["nodes"]
    assert seen["tokens"][0] == seen["tokens"][1]
    assert seen["proved"] > 0
    assert 0 < min(seen["old"]) <= max(seen["old"]) < 400


@pytest.fixture
def other_python(tmp_path: Path) -> tuple[str, Path]:
    """An environment with einops of another version than the driver's."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    site = Path(
        sysconfig.get_path(
            "purelib", "venv", {"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}
        )
    )
    (site / "driver.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copytree(Path(einops.__file__).parent, site / "einops")
    (site / "einops-0.8.99.dist-info").mkdir()
    (site / "einops-0.8.99.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: einops\nVersion: 0.8.99\n"
    )
    started = tmp_path / "started"
    (site / "sitecustomize.py").write_text(
        f"import importlib.metadata, os\nwith open({str(started)!r}, 'a') as file:"
        " print(os.getpid(), importlib.metadata.version('einops'), file=file)\n"
    )
    return str(tmp_path / "env" / "bin" / "python"), started


@pytest.mark.slow
def test_an_engine_in_another_environment(other_python):
    ray_cpus()
    python, started = other_python
    model, params = tiny_model(**SIZES), SamplingParams(max_new_tokens=12, n=2, seed=3)
    expected = vllm_backend(model).generate(random_prompts(4), params)
    backend = VLLMGenerationBackend(model=model, tokenizer=tiny_tokenizer())
    try:
        backend.setup(
            GenerationConfig(
                backend="vllm",
                num_replicas=1,
                python=python,
                engine={"kv_cache_memory_bytes": 2**26},
            )
        )
        assert [c.token_ids for c in backend.generate(random_prompts(4), params)] == [
            c.token_ids for c in expected
        ]
        versions = dict(line.split() for line in started.read_text().splitlines())
        found = versions[str(backend._engines.running()[0].place.pid)]
        assert found == "0.8.99" != importlib.metadata.version("einops")
    finally:
        backend.shutdown()


def backend_of(**options) -> None:
    ray_cpus()
    backend = VLLMGenerationBackend(model=tiny_model(**SIZES), tokenizer=tiny_tokenizer())
    try:
        backend.setup(GenerationConfig(backend="vllm", **{"num_replicas": 1, **options}))
    finally:
        backend.shutdown()


@pytest.mark.slow
def test_a_replica_that_splits_the_model(tmp_path: Path):
    """Over two processes of its own, which take new weights together and write to its log.

    The memory that they share has no name, so that none is left however they end.
    """
    ray_cpus()
    before = set(Path("/dev/shm").iterdir())
    prompts, params = random_prompts(4), SamplingParams(max_new_tokens=8, temperature=0.0)
    models = [tiny_model(seed=seed, **SIZES) for seed in (0, 1)]
    backend = VLLMGenerationBackend(model=models[0], tokenizer=tiny_tokenizer())
    engine = {"kv_cache_memory_bytes": 2**25}
    try:
        backend.setup(
            GenerationConfig(
                backend="vllm",
                num_replicas=1,
                tensor_parallel_size=2,
                log_dir=str(tmp_path),
                engine=engine,
            )
        )
        assert set(Path("/dev/shm").iterdir()) <= before
        for version, model in enumerate(models):
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
def test_a_model_that_one_device_does_not_hold_is_evaluated_by_two(tmp_path: Path):
    ray_cpus()
    tiny_model(**SIZES).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 8, "reward": "last_number"}
    alone = nemorl.evaluate(tmp_path, addition_rows()[:6], device="cpu", **options)
    divided = nemorl.evaluate(
        tmp_path,
        addition_rows()[:6],
        generation__backend="vllm",
        generation__tensor_parallel_size=2,
        generation__log_dir=str(tmp_path),
        generation__engine={"kv_cache_memory_bytes": 2**25},
        **options,
    )
    assert divided == alone
    assert "Worker_TP1" in (tmp_path / "replica-0.log").read_text()


class Wordy:
    def step(self, response):
        return nemorl.TurnResult(observation="1+1=" * 4, reward=1.0)


@pytest.mark.slow
def test_an_evaluation_cuts_what_its_engine_does_not_hold(tmp_path: Path):
    """Less than the model's own longest sequence."""
    ray_cpus()
    tiny_model(**SIZES).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found = nemorl.evaluate(
        tmp_path,
        [{"prompt": "1+1="}, {"prompt": "1+1=" * 20}],
        environment_factory=Wordy,
        max_new_tokens=4,
        generation__backend="vllm",
        generation__max_model_len=64,
        generation__engine={"kv_cache_memory_bytes": 2**25},
    )
    assert found["num_failed"] == 1 and 1 < found["metrics"]["turns"] < 16


@pytest.mark.slow
def test_a_process_of_the_engines_that_cannot_start_says_why():
    """Its reason is in the log alone: what vLLM raises refers to "the stack trace"."""
    ray_cpus()
    before = set(Path("/dev/shm").glob("psm_*"))
    with pytest.raises(
        ValueError,
        match=r"^ModuleNotFoundError: No module named 'no' .so the vLLM engine could not start",
    ):
        backend_of(
            tensor_parallel_size=2,
            engine={"kv_cache_memory_bytes": 2**25, "worker_cls": "no.such.Worker"},
        )
    assert set(Path("/dev/shm").glob("psm_*")) <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_replicas": NUM_CPUS + 1},
            rf"(?s)generation\.num_replicas is {NUM_CPUS + 1}: bundles must fit.*asked +generation"
            rf" +{NUM_CPUS + 1} x \(1 CPU\).*node .* {NUM_CPUS} CPU",
        ),
        (
            {"python": "/no/such/python"},
            r"generation\.python must be an interpreter, but it is '/no/such/python'",
        ),
        (
            {"weight_transport": "nccl"},
            r"generation\.weight_transport needs GPUs, but it is 'nccl': remove it",
        ),
    ],
)
def test_what_cannot_work_here_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        backend_of(**options)
