"""The protocol's paths, and what lists and changes saved states."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nemorl.runtime.serve.endpoint import MOST_BYTES, Handler
from nemorl.runtime.serve.tinker import store
from nemorl.runtime.serve.tinker.service import Service, TinkerCall
from nemorl.runtime.serve.tinker.training import Model
from nemorl.runtime.serve.wire import Json, Refused, demand

Work = Callable[[Service, TinkerCall], Any]
FLAGS = dict.fromkeys(
    (
        "proto_compress_fwdbwd",
        # For older clients.
        *("proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights"),
    ),
    True,
)


def routes(service: Callable[[], Service]) -> list[tuple[str, str, Handler]]:
    """Return method, path and handler of each of the protocol's paths."""

    def handler(work: Work) -> Handler:
        async def handle(owner: str, request: Request, body: bytes) -> Response:
            body = unpacked(body, request.headers.get("content-encoding", ""))
            at: Any = {"path": request.path_params, "query": request.query_params}
            found = work(service(), TinkerCall(owner=owner, body=body, **at))
            if isinstance(found, dict):
                return JSONResponse(found)
            media, answer = await found
            return Response(answer, media_type=media)

        return handle

    return [
        (method, f"/api/v1/{path}", handler(work))
        for route, work in ROUTES.items()
        for method, path in [route.split()]
    ]


def unpacked(raw: bytes, encoding: str) -> bytes:
    """Return a body without its compression. Raises: Refused for one that would be too large."""
    if encoding in ("", "identity"):
        return raw
    demand(encoding == "zstd", "content-encoding", "must be zstd", "send it as it is")
    packed = zstandard.ZstdDecompressor(max_window_size=MOST_BYTES)
    try:
        found = packed.stream_reader(raw).read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"the body must be zstd ({error}): pack it again") from error
    if len(found) > MOST_BYTES:
        must = f"the body must be at most {MOST_BYTES >> 20} MB once it is unpacked"
        raise Refused(f"{must}: send less", status=413)
    return found


def _train(verb: str) -> Work:
    return lambda of, call: of.train(verb, call)


def _beat(of: Service, call: TinkerCall) -> Json:
    of.require_mine(call.path.get("session") or str(call.json.get("session_id")), call)
    return {}


def _rank(about: Json) -> Json:
    return {"is_lora": about["rank"] > 0, "lora_rank": about["rank"] or None}


def _info(of: Service, call: TinkerCall) -> Json:
    model = of.model_of(call.json.get("model_id"), call)
    data = {"model_name": of.model, "tokenizer_id": of.tokenizer}
    return {"model_id": model.id, "model_data": data, **_rank(model.about)}


def _weights_info(of: Service, call: TinkerCall) -> Json:
    _, about = of.trainer.state_of(str(call.json.get("tinker_path")), call.owner)
    return {
        "base_model": of.model,
        "train_unembed": False,
        "train_mlp": about["train_mlp"],
        "train_attn": about["train_attn"],
        **_rank(about),
    }


def _sampler(of: Service, call: TinkerCall) -> Json:
    of.require_mine(id := call.path["sampler"], call)
    return {
        "sampler_id": id,
        "base_model": of.model,
        "model_path": of.sampler(id).about["model_path"],
    }


def _checkpoint(folder: Path, about: Json) -> Json:
    return {
        "checkpoint_id": f"{folder.parent.name}/{folder.name}",
        "checkpoint_type": store.KINDS[folder.parent.name],
        "time": about["time"],
        "tinker_path": store.path_of(folder),
        "size_bytes": sum(each.stat().st_size for each in folder.rglob("*")),
        "user_metadata": about["metadata"],
        "expires_at": about["expires"] and store.date(about["expires"]),
    }


def _saved(model: Model) -> list[Json]:
    return [_checkpoint(*each) for each in store.states(model.folder)]


def _run(of: Service, model: Model) -> Json:
    last = {each["checkpoint_type"]: each for each in _saved(model)}
    return {
        "training_run_id": model.id,
        "base_model": of.model,
        "model_owner": of.trainer.owners[model.session],
        **_rank(model.about),
        "last_request_time": store.date((model.folder / "requests").stat().st_mtime),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": model.about["metadata"],
    }


def _mine(of: Service, call: TinkerCall) -> list[Model]:
    owners = of.trainer.owners
    found = [each for each in of.models.values() if owners[each.session] == call.owner]
    return sorted(found, key=lambda each: each.about["time"], reverse=True)


def _page(call: TinkerCall, values: list[Any], limit: int) -> tuple[list[Any], Json]:
    try:
        limit = max(int(call.query.get("limit", limit)), 0)
        offset = max(int(call.query.get("offset", 0)), 0)
    except ValueError as error:
        raise Refused(f"limit and offset must be whole numbers ({error})") from error
    cursor = {"offset": offset, "limit": limit, "total_count": len(values)}
    return values[offset:][:limit], {"cursor": cursor}


def _runs(of: Service, call: TinkerCall) -> Json:
    found, cursor = _page(call, _mine(of, call), 20)
    return {"training_runs": [_run(of, each) for each in found], **cursor}


def _checkpoints(of: Service, call: TinkerCall) -> Json:
    every = [state for model in _mine(of, call) for state in _saved(model)]
    every.sort(key=lambda each: each["time"], reverse=True)
    found, cursor = _page(call, every, 100)
    return {"checkpoints": found, **cursor}


def _sessions(of: Service, call: TinkerCall) -> Json:
    mine = [id for id, owner in of.trainer.owners.items() if owner == call.owner]
    return {"sessions": _page(call, mine[::-1], 20)[0]}


def _session(of: Service, call: TinkerCall) -> Json:
    of.require_mine(id := call.path["session"], call)
    about = json.loads((of.root / "sessions" / f"{id}.json").read_bytes())
    return {
        "training_run_ids": [each for each in of.models if each.startswith(id)],
        "sampler_ids": [each for each in of.samplers if each.startswith(id)],
        **{name: about.get(name) for name in ("user_metadata", "display_name")},
    }


def _state(of: Service, call: TinkerCall) -> tuple[Path, Json]:
    path = "tinker://{run}/{kind}/{name}".format_map(call.path)
    return of.trainer.state_of(path, call.owner)


def _delete(of: Service, call: TinkerCall) -> Json:
    folder, _ = _state(of, call)
    gone = folder.rename(folder.with_name(f".{folder.name}.gone"))  # whole or not at all
    shutil.rmtree(gone)
    return {}


def _expire(of: Service, call: TinkerCall) -> Json:
    (folder, about), ttl = _state(of, call), call.json.get("ttl_seconds")
    demand(
        ttl is None or (isinstance(ttl, int) and 0 < ttl <= store.LONGEST_TTL),
        "ttl_seconds",
        f"must be null or 1 to {store.LONGEST_TTL} seconds",
        "change it",
    )
    store.write_json(folder / store.ABOUT, about | {"expires": ttl and time.time() + ttl})
    return {}


RUN = "training_runs/{run}"
STATE = f"{RUN}/checkpoints/{{kind}}/{{name}}"
VERBS = (
    *("forward", "forward_backward", "optim_step"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external"),
)
ROUTES: dict[str, Work] = {
    "POST client/config": lambda of, call: FLAGS,
    "POST client/dynamic_config": lambda of, call: {},
    "POST telemetry": lambda of, call: {"status": "accepted"},
    "POST create_session": Service.create_session,
    "POST session_heartbeat": _beat,
    "POST create_model": Service.create_model,
    "POST load_weights": Service.load_weights,
    **{f"POST {verb}": _train(verb) for verb in VERBS},
    "POST create_sampling_session": Service.create_sampler,
    "POST asample": Service.sample,
    "POST retrieve_future": Service.result,
    "POST get_info": _info,
    "POST weights_info": _weights_info,
    "GET healthz": lambda of, call: {"status": "ok"},
    "GET get_server_capabilities": lambda of, call: {
        "supported_models": [
            {
                "model_name": of.model,
                "max_context_length": of.trainer.longest,
                "trainable": True,
                "sampleable": True,
            }
        ]
    },
    "GET training_runs": _runs,
    f"GET {RUN}": lambda of, call: _run(of, of.model_of(call.path["run"], call)),
    f"GET {RUN}/checkpoints": lambda of, call: {
        "checkpoints": _saved(of.model_of(call.path["run"], call))
    },
    "GET checkpoints": _checkpoints,
    f"DELETE {STATE}": _delete,
    f"PUT {STATE}/ttl": _expire,
    "GET samplers/{sampler}": _sampler,
    "GET sessions": _sessions,
    "GET sessions/{session}": _session,
    "POST sessions/{session}/finish": _beat,
}
