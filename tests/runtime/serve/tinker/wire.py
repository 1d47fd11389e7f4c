"""A service of the Tinker protocol, and a client of plain requests."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from nemorl.parallel.config import ModelConfig
from nemorl.runtime.cli.inference import served
from nemorl.runtime.cli.settings import ServeConfig
from nemorl.runtime.serve.tinker.messages import MESSAGES, tensor
from tests.tiny_models import tiny_tokenizer

ADAM = {"learning_rate": 0.01, "grad_clip_norm": 0.0}
KEYS = {name: f"tml-{name:0>16}" for name in ("me", "you", "monitor")}


def write_files(folder: Path, model: Any) -> None:
    """Write what a service needs: a model and keys."""
    model.save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    roles = {"monitor": "read"}
    keys = {k: {"key": key, "role": roles.get(k, "train")} for k, key in KEYS.items()}
    (folder / "keys").write_text(yaml.dump(keys))


@contextmanager
def serving(folder: Path, model: Any, **options: Any) -> Iterator[str]:
    """Give the URL of a service in this process."""
    write_files(folder, model)
    config = ServeConfig(
        model=ModelConfig(path=str(folder / "tiny")),
        name="tiny",
        tinker=True,
        dir=str(folder / "run"),
        port=0,
        keys=str(folder / "keys"),
        **options,
    )
    with served(config) as (endpoint, _):
        yield endpoint.url


def csr(dense: Any) -> Any:
    """A matrix as its cells that are not 0."""
    dense = np.asarray(dense)
    rows = np.cumsum([0, *(dense != 0).sum(1)])
    cells = {"values": dense[dense != 0].tobytes(), "columns": dense.nonzero()[1].tobytes()}
    dtype = 2 if dense.dtype.kind == "i" else 1
    cells["rows"] = rows.tobytes()
    return MESSAGES["Tensor"](csr=cells, dtype=dtype, shape=dense.shape)


def datum(tokens: Any, **inputs: Any) -> Any:
    """A datum; arrays of floats are float32."""
    given = []
    for key, value in inputs.items():
        if not isinstance(value, MESSAGES["Tensor"]):
            value = np.asarray(value)
            value = tensor(value.astype("f4") if value.dtype.kind == "f" else value)
        given.append({"key": key, "value": value})
    text = {"text": {"tokens": np.array(tokens, "<i4").tobytes()}}
    return MESSAGES["Datum"](chunks=[text], inputs=given)


def arrays(values: Any) -> np.ndarray:
    return np.frombuffer(values, "<f4")


class Client:
    """One key's requests; those of a model are numbered."""

    def __init__(self, url: str, key: str, session: str | None = None) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=60)
        self.counts: dict[str, itertools.count[int]] = {}
        self.session = session or self.ok("create_session")["session_id"]
        self.models, self.samplers = itertools.count(), itertools.count()

    def post(self, path: str, content: bytes | None = None, /, **body: Any) -> httpx.Response:
        given = {"json": body} if content is None else {"content": content}
        return self.http.post(path, **given)

    def ok(self, path: str, content: bytes | None = None, /, **body: Any) -> Any:
        found = self.post(path, content, **body)
        assert found.status_code == 200, found.text
        return found.json()

    def result(self, promise: Any) -> Any:
        """A request's answer, as JSON or bytes."""
        while True:
            found = self.post("retrieve_future", request_id=promise["request_id"])
            assert found.status_code == 200, found.text
            if "protobuf" in found.headers["content-type"]:
                return found.content
            if found.json().get("type") != "try_again":
                return found.json()

    def create(self, rank: int = 4, *, state: str | None = None, **body: Any) -> str:
        """Make a model, and return its id."""
        body |= {"session_id": self.session, "model_seq_id": next(self.models)}
        if state:
            found = self.ok("load_weights", path=state, **{"optimizer": True, **body})
        else:
            lora = {"rank": rank, "seed": 1}
            found = self.ok("create_model", base_model="tiny", lora_config=lora, **body)
        made = self.result(found)
        assert "error" not in made, made
        self.counts[made["model_id"]] = itertools.count(1)
        return str(made["model_id"])

    def ask(self, verb: str, model: str, *, seq_id: int | None = None, **body: Any) -> Any:
        """The promise of a request to a model."""
        return self.ok(verb, model_id=model, seq_id=self.number(model, seq_id), **body)

    def number(self, of: str, given: int | None) -> int:
        return next(self.counts[of]) if given is None else given

    def step(self, model: str, **adam: Any) -> Any:
        return self.result(self.ask("optim_step", model, adam_params={**ADAM, **adam}))

    def send(self, model: str, data: Any, loss: str, **options: Any) -> Any:
        return self.ok("forward_backward", self.work(model, data, loss, **options))

    def work(
        self,
        model: str,
        data: Any,
        loss: str,
        *,
        only: bool = False,
        seq_id: Any = None,
        **config: Any,
    ) -> bytes:
        return MESSAGES["ForwardBackwardRequest"](
            model_id=model,
            seq_id=self.number(model, seq_id),
            data=data,
            loss_fn=loss,
            forward_only=only,
            settings=[{"key": k, "value": {"number": v}} for k, v in config.items()],
        ).SerializeToString()

    def passed(
        self, model: str, data: Any, loss: str, **options: Any
    ) -> tuple[Any, list[np.ndarray]]:
        """A loss, or an error's text, and log-probabilities."""
        found = self.result(self.send(model, data, loss, **options))
        if not isinstance(found, bytes):
            return found["error"], []
        output, parts = MESSAGES["ForwardBackwardOutput"].FromString(found), []
        for record in output.records:
            (each,) = record.fields
            ends = np.frombuffer(each.value.offsets, "<i8")
            for begin, end in itertools.pairwise(ends):
                values = arrays(each.value.data[begin:end])
                parts.append(values.reshape(-1, *each.value.trailing_shape))
        return {each.key: each.value for each in output.metrics}["loss:sum"], parts

    def save(self, model: str, name: str, verb: str = "save_weights", **options: Any) -> str:
        """Save a state, and return its path, or an error's text."""
        found = self.result(self.ask(verb, model, path=name, **options))
        return str(found.get("path", found.get("error")))

    def sampler(self, path: str | None = None) -> str:
        given = {"model_path": path} if path else {"base_model": "tiny"}
        body = {"session_id": self.session, "sampling_session_seq_id": next(self.samplers)}
        found = self.ok("create_sampling_session", **body, **given)["sampling_session_id"]
        self.counts[found] = itertools.count()
        return str(found)

    def submit(self, sampler: str, tokens: Any, *, seq_id: int | None = None, **body: Any) -> Any:
        params = {name: body.pop(name) for name in [*body] if name in PARAMS}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [*tokens]}]}
        body |= {"sampling_session_id": sampler, "seq_id": self.number(sampler, seq_id)}
        body["prompt"] = prompt
        return self.ok("asample", sampling_params=params, **body)

    def sample(self, sampler: str, tokens: Any, **body: Any) -> Any:
        found = self.result(self.submit(sampler, tokens, **body))
        if isinstance(found, bytes):
            return MESSAGES["SampleResponse"].FromString(found)
        return found["error"]


PARAMS = "max_tokens", "seed", "stop", "temperature", "top_k", "top_p"


def said(answer: Any) -> list[list[int]]:
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in answer.sequences]
