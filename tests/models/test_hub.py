"""A name on the hub: refused at once where there is no network, followed with patience where there
is.
"""

import json
import logging
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from nemorl.models.hub import load_tokenizer, model_folder, require_hub
from nemorl.parallel.planner.model_shape import read_shape

COMMIT = "0" * 40
CONFIG = json.dumps(
    {
        **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
).encode()


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """As with HF_ENDPOINT, which huggingface_hub reads when it is imported."""
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a hub that may be asked, at a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    use_hub(monkeypatch, port)
    return tmp_path


class Hub(BaseHTTPRequestHandler):
    """Answers with the statuses of the list that the server has, one after the other; then with the
    file.
    """

    def _answer(self) -> None:
        if not self.path.endswith("config.json"):
            self.send_error(404)  # to a thread that transformers left behind
            return
        status = self.server.statuses.pop(0) if self.server.statuses else 200  # type: ignore[attr-defined]
        self.server.asked.append(f"{self.command} {status}")  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(CONFIG)))
        self.send_header("ETag", '"etag"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(CONFIG)

    do_GET = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.statuses, server.asked = [], []  # type: ignore[attr-defined]
    use_hub(monkeypatch, server.server_port)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


WITHOUT_NETWORK: dict[str, Callable[[], object]] = {
    "plan": lambda: read_shape("owner/name"),
    "a model": lambda: model_folder("owner/name"),
    "a tokenizer": lambda: load_tokenizer("owner/name"),
}


@pytest.mark.parametrize("what", WITHOUT_NETWORK)
def test_without_a_network_a_name_is_refused_at_once(
    what: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    message = r"'owner/name' could not be loaded \(there is no such folder, .* can't be reached"
    with pytest.raises(ValueError, match=message):
        WITHOUT_NETWORK[what]()
    assert not caplog.records, "huggingface_hub logs that it tries again"


def test_an_adapter_whose_base_is_not_here(cache: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    for base in ("owner/name", "/nowhere/base"):
        config = json.dumps({"base_model_name_or_path": base})
        (tmp_path / "mine" / "adapter_config.json").write_text(config)
        said = (
            rf"^model\.path .*mine'.*\(it is an adapter of {base}, which can't be found\): correct"
        )
        with pytest.raises(ValueError, match=said):
            model_folder(str(tmp_path / "mine"))
    (tmp_path / "config.json").write_bytes(CONFIG)
    config = json.dumps({"base_model_name_or_path": str(tmp_path)})
    (tmp_path / "mine" / "adapter_config.json").write_text(config)
    assert model_folder(str(tmp_path / "mine"))
    with pytest.raises(
        ValueError, match=r"\(it is an adapter without a tok.*add --model\.tokenizer /"
    ):
        load_tokenizer(str(tmp_path / "mine"))


def test_what_is_in_the_cache_needs_no_network(cache: Path):
    model = cache / "models--owner--name"
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_bytes(CONFIG)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    assert model_folder("owner/name") == "owner/name"
    assert read_shape("owner/name").num_hidden_layers == 2


@pytest.mark.parametrize("status", [200, 401, 404, 429, 503])
def test_a_hub_that_answers_is_for_whoever_loads(status: int, hub: ThreadingHTTPServer):
    hub.statuses[:] = [status]  # type: ignore[attr-defined]
    require_hub("owner/name", "config.json")
    assert hub.asked == [f"HEAD {status}"]  # type: ignore[attr-defined]


def test_a_hub_that_fails_now_and_then_is_asked_again(hub: ThreadingHTTPServer):
    hub.statuses[:] = [503, 503, 503]  # type: ignore[attr-defined]
    assert read_shape("owner/name").hidden_size == 64
    assert hub.asked == ["HEAD 503", "HEAD 503", "HEAD 503", "HEAD 200", "GET 200"]  # type: ignore[attr-defined]
