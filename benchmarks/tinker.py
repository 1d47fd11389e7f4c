"""The Tinker service: what it adds to a training step and to a sample.

    python benchmarks/tinker.py [--small]

A step is `forward_backward` and `optim_step` of one request, by HTTP to `nemorl serve --tinker` and
by the library on the same batch, in turns; the log-probabilities of both must be equal.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import zstandard
from common import VOCABULARY, command, median_ratio, saved_model

from nemorl import BackendConfig, GenerationConfig, ModelConfig, OptimSettings, SamplingParams
from nemorl.parallel.config import LoRAConfig
from nemorl.rollout.calls import blocking
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run.registry import get_training_backend
from nemorl.runtime.serve.tinker.data import read_work
from nemorl.runtime.serve.tinker.messages import MESSAGES, tensor

NAME, KEY = "bench/model", "tml-benchmark-0123456789"


@dataclass(frozen=True, kw_only=True)
class Options:
    """A step of random sequences, and samples one after the other."""

    tokens: int = 262_144
    """Of a step: a megabyte of int32."""
    length: int = 512
    hidden: int = 64
    rank: int = 8
    rounds: int = 3
    samples: int = 30


@contextmanager
def service(folder: Path) -> Iterator[httpx.Client]:
    """A client of a service in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = folder / "keys.yaml"
    keys.write_text(f"bench: {{key: {KEY}, role: train}}\n")
    args = ["serve", str(folder / "model"), "--name", NAME, "--tinker", "--port", str(port)]
    args += ["--dir", str(folder / "service"), "--keys", str(keys), "--model.tokenizer"]
    args += [
        str(folder / "model" / "tokenizer"),
        "--trainer.device",
        "cpu",
        "--generation.backend",
        "torch",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "nemorl", *args], env=env)
    url = f"http://127.0.0.1:{port}/api/v1"
    try:
        with httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=600) as client:
            while True:
                try:
                    if client.get("/healthz").status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None
                    time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def call(client: httpx.Client, path: str, body: Any) -> Any:
    """The result of a request."""
    if isinstance(body, bytes):
        packed = zstandard.ZstdCompressor().compress(body)
        found = client.post(path, content=packed, headers={"content-encoding": "zstd"})
    else:
        found = client.post(path, json=body)
    promise = found.raise_for_status().json()
    while "request_id" in promise:
        asked = {"request_id": promise["request_id"], "allow_metadata_only": False}
        found = client.post("/retrieve_future", json=asked).raise_for_status()
        if "json" not in found.headers["content-type"]:
            return found.content
        promise = found.json()
    assert "error" not in promise, promise
    return promise


def step_message(options: Options, model: str, seq_id: int) -> Any:
    rng, data = np.random.default_rng(seq_id), []
    for _ in range(options.tokens // options.length):
        ids = rng.integers(2, VOCABULARY, options.length + 1)
        weights = np.full(options.length, 1 / options.tokens, np.float32)
        inputs = {"target_tokens": ids[1:].astype(np.int64), "weights": weights}
        named = [{"key": key, "value": tensor(value)} for key, value in inputs.items()]
        tokens = ids[:-1].astype("<i4").tobytes()
        data.append({"chunks": [{"text": {"tokens": tokens}}], "inputs": named})
    message = MESSAGES["ForwardBackwardRequest"]
    return message(model_id=model, seq_id=seq_id, data=data, loss_fn="cross_entropy")


def show(found: dict[str, list[float]], what: str) -> None:
    for way, seconds in found.items():
        times = median_ratio(found["library"], seconds)
        print(f"  {way:<9}{1000 * median(seconds):10.1f} ms a {what}, {times:.3f} of the library's")


def main(options: Options) -> None:
    positions = options.length + 1
    with saved_model(hidden=options.hidden, positions=positions) as (folder, size):
        print(f"{size / 1e6:.1f} M parameters, LoRA of rank {options.rank}")
        setup = BackendConfig(
            model=ModelConfig(path=str(folder / "model")), lora=LoRAConfig(rank=options.rank)
        )
        backend = get_training_backend("dtensor")
        backend.setup(setup)
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        settings = OptimSettings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, max_grad_norm=np.inf)
        with service(folder) as client:
            session = call(client, "/create_session", {"tags": [], "sdk_version": "0"})
            made = {"session_id": session["session_id"], "base_model": NAME, "model_seq_id": 0}
            lora = {"rank": options.rank, "seed": 0}
            model = call(client, "/create_model", made | {"lora_config": lora})["model_id"]
            found: dict[str, list[float]] = {"library": [], "service": []}
            for number in range(options.rounds + 1):
                message = step_message(options, model, 2 * number + 1)
                body = message.SerializeToString()
                work = read_work(message, vocab_size=VOCABULARY, longest=positions)
                start = time.perf_counter()
                output = backend.forward_backward(work.batch, work.loss, token_logprobs=True)
                backend.optim_step(settings)
                middle = time.perf_counter()
                answer = call(client, "/forward_backward", body)
                stepped = {"model_id": model, "seq_id": 2 * number + 2, "adam_params": adam}
                call(client, "/optim_step", stepped)
                end = time.perf_counter()
                theirs = MESSAGES["ForwardBackwardOutput"].FromString(answer)
                ours = work.answer(output.token_logprobs, theirs.metrics[0].value)
                assert MESSAGES["ForwardBackwardOutput"].FromString(ours) == theirs
                if number:
                    found["library"].append(middle - start)
                    found["service"].append(end - middle)
            show(found, "step")
            sample(options, client, session["session_id"], folder)
        backend.shutdown()


def sample(options: Options, client: httpx.Client, session: str, folder: Path) -> None:
    from common import load_tokenizer

    tokenizer = load_tokenizer(folder / "model")
    engine = TorchGenerationBackend(model=str(folder / "model"), tokenizer=tokenizer)
    engine.setup(GenerationConfig())
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = call(client, "/create_sampling_session", made)["sampling_session_id"]
    prompt = list(range(2, 34))
    found: dict[str, list[float]] = {"library": [], "service": []}
    for number in range(options.samples + 1):
        params = SamplingParams(max_new_tokens=16, seed=number, ignore_eos=True)
        asked = {"max_tokens": 16, "seed": number, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": asked}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        start = time.perf_counter()
        ours = blocking(engine.sample(prompt, params))[0]
        middle = time.perf_counter()
        theirs = MESSAGES["SampleResponse"].FromString(call(client, "/asample", body))
        end = time.perf_counter()
        assert ours.token_ids == tuple(np.frombuffer(theirs.sequences[0].tokens, "<i4").tolist())
        if number:
            found["library"].append(middle - start)
            found["service"].append(end - middle)
    show(found, "sample of 16 tokens")


if __name__ == "__main__":
    command(main, Options, tokens=1024, length=64, rounds=1, samples=2)
