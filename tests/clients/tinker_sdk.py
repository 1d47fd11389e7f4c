# /// script
# dependencies = ["tinker==0.38.0", "torch==2.13.0"]
# ///
"""Drive a service by all of the public calls of Tinker's SDK, version 0.25, 0.30 or 0.38.

The input is {"base_model": NAME, "rank": R, "loras": [R, …]}; each step prints {"step": NAME, …}
with the numbers that it got.
"""

import json
import pickle
import sys
from importlib.util import find_spec

import numpy as np
import tinker
from tinker import types

given = json.load(sys.stdin)
VERSION = tuple(map(int, tinker.__version__.split(".")[:2]))
ROW = [5, 9, 13, 9, 5, 20, 31, 7, 11, 2, 40, 8]
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1)
CLIPPED = types.AdamParams(learning_rate=5e-3, grad_clip_norm=0.5)


def show(step: str, **found) -> None:
    print(json.dumps({"step": step, **found}), flush=True)


def wait(value):
    """Newer versions return futures of clients, older ones the clients."""
    return value.result() if hasattr(value, "result") else value


def refused(call) -> list:
    """Return how a call failed."""
    try:
        wait(call())
    except Exception as error:
        status = getattr(error, "status_code", getattr(error, "category", None))
        return [type(error).__name__, status, str(error)]
    return ["nothing", None, ""]


def inputs(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int], **more) -> types.Datum:
    given = {"target_tokens": tokens[1:], **more}
    return types.Datum(model_input=inputs(tokens[:-1]), loss_fn_inputs=given)


def rows(**more) -> list[types.Datum]:
    """Three rows of unlike lengths. more: of each input, a function of the row's length."""
    sizes = (12, 7, 9)
    return [
        datum(ROW[:size], **{name: make(size - 1) for name, make in more.items()}) for size in sizes
    ]


def numbers(output) -> dict:
    logprobs = [each["logprobs"].tolist() for each in output.loss_fn_outputs]
    return {"loss": output.metrics["loss:sum"], "logprobs": logprobs}


def spread(low: float, high: float):
    return lambda size: [float(x) for x in np.linspace(low, high, size, dtype=np.float32)]


service = tinker.ServiceClient(user_metadata={"of": "the test"})
rest = service.create_rest_client()
BASE = given["base_model"]
models = service.get_server_capabilities().supported_models
show("capabilities", models=[each.model_name for each in models])
training = wait(service.create_lora_training_client(BASE, rank=given["rank"], seed=3))
info = training.get_info()
show("info", name=info.model_data.model_name, is_lora=info.is_lora, rank=info.lora_rank)

# Losses, each with a step
WEIGHTS = spread(0.0, 2.0)
POLICY = {"logprobs": spread(-4.0, -3.0), "advantages": spread(-1.0, 1.5)}
LOSSES = [
    ("cross_entropy", {"weights": WEIGHTS}, None),
    ("importance_sampling", POLICY, None),
    ("ppo", POLICY, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}),
    ("cispo", POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 1.1}),
    ("dro", POLICY, {"beta": 0.05}),
]
show("forward", **numbers(wait(training.forward(rows(), "cross_entropy"))))
for place, (name, made, config) in enumerate(LOSSES):
    passed = training.forward_backward(rows(**made), name, config)
    stepped = training.optim_step(CLIPPED if place % 2 else ADAM)
    show(name, **numbers(wait(passed)), metrics=wait(stepped).metrics)
zero = numbers(wait(training.forward(rows(weights=spread(0.0, 0.0)), "cross_entropy")))
show("zero weights", loss=zero["loss"])
thresholds = {"clip_low_threshold": spread(0.5, 1.0), "clip_high_threshold": spread(1.0, 2.0)}
show("ppo per token", **numbers(wait(training.forward(rows(**POLICY, **thresholds), "ppo"))))

# Targets that are distributions, dense and as the cells that are not 0
targets = np.stack([np.roll(ROW[:-1], -1), np.roll(ROW[:-1], -2)], axis=1)
shares = np.stack([np.full(11, 0.75), np.full(11, 0.25)], axis=1).astype(np.float32)
soft = {"target_tokens": targets, "weights": shares}
soft = [types.Datum(model_input=inputs(ROW[:-1]), loss_fn_inputs=soft)]
show("soft targets", **numbers(wait(training.forward_backward(soft, "cross_entropy"))))
wait(training.optim_step(ADAM))

# Calls of several requests, accumulated
many = [datum(ROW[:4])] * 1100
whole = wait(training.forward(many, "cross_entropy"))
same = {tuple(each["logprobs"].tolist()) for each in whole.loss_fn_outputs}
one = numbers(wait(training.forward(many[:1], "cross_entropy")))
show("many", loss=whole.metrics["loss:sum"], one=one["loss"], count=len(many), distinct=len(same))
for part in rows(weights=WEIGHTS):
    wait(training.forward_backward([part], "cross_entropy"))
show("accumulated", metrics=wait(training.optim_step(ADAM)).metrics)

# What fails, fails alone
nan = datum(ROW[:3], weights=[float("nan"), 1.0])
outside = datum([5, 10**6, 7])
short = types.Datum(model_input=inputs(ROW[:5]), loss_fn_inputs={"target_tokens": [1, 2]})
image = types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png")])
image = types.Datum(model_input=image, loss_fn_inputs={"target_tokens": [1]})
bad = [
    ("unknown loss", lambda: training.forward_backward(rows(), "stable_reinforce")),
    ("unknown setting", lambda: training.forward_backward(rows(**POLICY), "ppo", {"beta": 1.0})),
    ("setting of none", lambda: training.forward(rows(), "cross_entropy", {"beta": 1.0})),
    ("no advantages", lambda: training.forward_backward(rows(), "ppo")),
    ("nan weights", lambda: training.forward_backward([nan], "cross_entropy")),
    ("token outside", lambda: training.forward_backward([outside], "cross_entropy")),
    ("short targets", lambda: training.forward_backward([short], "cross_entropy")),
    ("image", lambda: training.forward_backward([image], "cross_entropy")),
    ("no gradients", lambda: training.optim_step(ADAM)),
    ("negative rate", lambda: training.optim_step(types.AdamParams(learning_rate=-1.0))),
    ("path trick", lambda: training.save_state("../../escaped")),
    ("other model", lambda: service.create_lora_training_client("org/other", rank=4)),
    ("unknown state", lambda: service.create_training_client_from_state("tinker://a/weights/b")),
]
for name, call in bad:
    show(f"refused: {name}", error=refused(call))
show("goes on", **numbers(wait(training.forward(rows(), "cross_entropy"))))

# What only newer versions have, and what needs torch, with a model of its own
apart = wait(service.create_lora_training_client(BASE, rank=given["rank"], seed=3))
if VERSION >= (0, 38):
    mask = {"sequence_ratio_mask": lambda size: [1.0] * size}
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    passed = apart.forward_backward(rows(**POLICY, **mask), "gspo", config)
    stepped = apart.optim_step(ADAM)
    show("gspo", **numbers(wait(passed)), metrics=wait(stepped).metrics)
    shares[1::2] = 0
    few = types.TensorData(
        data=shares[::2].ravel(),
        dtype="float32",
        shape=[11, 2],
        sparse_crow_indices=np.cumsum([0, *(2 * (i % 2 == 0) for i in range(11))]).tolist(),
        sparse_col_indices=[0, 1] * 6,
    )
    sparse = {"target_tokens": targets, "weights": few}
    sparse = [types.Datum(model_input=inputs(ROW[:-1]), loss_fn_inputs=sparse)]
    show("sparse weights", **numbers(wait(apart.forward(sparse, "cross_entropy"))))
if find_spec("torch"):
    import torch

    def squares(data: list, logprobs: list) -> tuple:
        return torch.stack([(each + 2).square().sum() for each in logprobs]).sum(), {"seen": 3.0}

    passed = apart.forward_backward_custom(rows(), squares)
    stepped = apart.optim_step(ADAM)
    passed = wait(passed)
    show("custom", **numbers(passed), seen=passed.metrics["seen"], metrics=wait(stepped).metrics)
    if VERSION >= (0, 38):

        def weighed(logprobs, weights):
            return (weights * logprobs**2).sum(), {}

        traced = wait(service.create_custom_loss(weighed, {"logprobs": 1, "weights": 1}))
        passed = wait(apart.forward_backward_custom(rows(weights=WEIGHTS), traced))
        show("traced", **numbers(passed))

# Saved states
path = wait(training.save_state("one")).path
show("taken", error=refused(lambda: training.save_state("one")))
alone = wait(service.create_training_client_from_state(path))
full = wait(service.create_training_client_from_state_with_optimizer(path))
for name, client in [("original", training), ("weights alone", alone), ("with optimizer", full)]:
    first = numbers(wait(client.forward_backward(rows(weights=WEIGHTS), "cross_entropy")))
    wait(client.optim_step(ADAM))
    after = numbers(wait(client.forward(rows(), "cross_entropy")))
    show(f"continued: {name}", first=first, after=after)
again = wait(service.create_lora_training_client(BASE, rank=given["rank"], seed=3))
wait(again.load_state(path))
show("load_state", **numbers(wait(again.forward(rows(), "cross_entropy"))))
show("load_state later", error=refused(lambda: training.load_state_with_optimizer(path)))
loras = [wait(service.create_lora_training_client(BASE, rank=rank)) for rank in given["loras"]]
for turn in range(2):
    for rank, client in zip(given["loras"], loras, strict=True):
        passed = client.forward_backward(rows(weights=WEIGHTS), "cross_entropy")
        wait(client.optim_step(ADAM))
        show(f"lora {rank}, turn {turn}", **numbers(wait(passed)))

# Sampling
saved = wait(training.save_weights_for_sampler("one", ttl_seconds=3600)).path
named = wait(service.create_sampling_client(model_path=saved))
sampler = wait(training.save_weights_and_get_sampling_client())
base = wait(service.create_sampling_client(base_model=BASE))
prompt = inputs(ROW[:6])


def sampled(client, count: int = 1, more: dict | None = None, **params):
    params = types.SamplingParams(**{"max_tokens": 8} | params)
    return wait(client.sample(prompt, count, params, **(more or {})))


def said(found) -> list:
    return [[each.tokens, each.logprobs, each.stop_reason] for each in found.sequences]


greedy = sampled(sampler, temperature=0.0, stop=[])
show("greedy", said=said(greedy))
show("greedy by path", said=said(sampled(named, temperature=0.0, stop=[])))
show("greedy of the base", said=said(sampled(base, temperature=0.0, stop=[])))
tokens = greedy.sequences[0].tokens
show("stop id", said=said(sampled(sampler, temperature=0.0, stop=[tokens[2]])))
text = sampler.get_tokenizer().decode(tokens[1:3])
show("stop text", said=said(sampled(sampler, temperature=0.0, stop=text)))
show("stop texts", said=said(sampled(sampler, temperature=0.0, stop=["no", text])))
show("unasked", found=[greedy.prompt_logprobs, greedy.topk_prompt_logprobs])
for seed in (1, 1, 2):
    show(f"seed {seed}", said=said(sampled(sampler, 3, seed=seed, stop=[])))
for seed in (5, 6):
    show("top_k 1", said=said(sampled(sampler, seed=seed, top_k=1, stop=[])))
show("top_p", said=said(sampled(sampler, seed=5, top_p=0.1, stop=[])))
show("hot", said=said(sampled(sampler, seed=5, temperature=3.0, stop=[])))
want = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
found = sampled(sampler, more=want, max_tokens=1)
show("prompt", logprobs=found.prompt_logprobs, top=found.topk_prompt_logprobs)
written = [each.get_tokenizer().encode("1+1=") for each in (training, sampler, base)]
show("tokenizers", written=written)
show("computed", logprobs=wait(sampler.compute_logprobs(prompt)))
copy = pickle.loads(pickle.dumps(sampler))
show("copy", said=said(sampled(copy, temperature=0.0, stop=[])))
if VERSION >= (0, 30):
    found = sampled(sampler, more={"topk_sample_logprobs": 2}, temperature=0.0, stop=[])
    ids = [each.sequence_id for each in sampled(sampler, 3).sequences]
    show("top sampled", top=found.sequences[0].topk_logprobs, ids=len(set(ids)))
    asked = types.TensorData(data=[9, -1, 3, 5, -1, 7, 2, 2, 4, -1], dtype="int64", shape=[5, 2])
    found = sampled(sampler, more={"target_prompt_logprobs": asked}, max_tokens=1)
    show("targets", found=found.target_prompt_logprobs.tolist(), asked=asked.tolist())
if VERSION >= (0, 38):
    copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    show("copy by handle", said=said(sampled(copy, temperature=0.0, stop=[])))
    cells = {"sparse_crow_indices": [0, 0, 1, 1, 1, 2], "sparse_col_indices": [1, 0]}
    asked = types.TensorData(data=[5, 4], dtype="int64", shape=[5, 2], **cells)
    found = sampled(sampler, more={"target_prompt_logprobs": asked}, max_tokens=1)
    scores = found.target_prompt_logprobs
    cells = {name: getattr(scores, name) for name in cells}
    show("sparse targets", data=scores.data, shape=scores.shape, **cells)
    last = {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    show("last two", logprobs=sampled(sampler, more=last, max_tokens=1).prompt_logprobs)
    found = sampled(sampler, more={"prompt_alt_tokens_k": 4}, max_tokens=1, seed=3)
    drawn = found.prompt_alt_tokens
    show("alternatives", tokens=drawn.tokens.tolist(), logprobs=drawn.logprobs.tolist())
picture = types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png")])
one = types.SamplingParams(max_tokens=1)
show("refused: image prompt", error=refused(lambda: sampler.sample(picture, 1, one)))
for name, params in [("temperature", {"temperature": -1.0}), ("top_p", {"top_p": 0.0})]:
    show(f"refused: {name}", error=refused(lambda params=params: sampled(sampler, **params)))

# Lists, expiry, deletion
run = training.model_id


def listed() -> list[str]:
    return sorted(each.checkpoint_id for each in wait(rest.list_checkpoints(run)).checkpoints)


runs = wait(rest.list_training_runs())
mine = wait(rest.get_training_run(run))
assert run in [each.training_run_id for each in runs.training_runs]
assert len(runs.training_runs) == min(runs.cursor.total_count, 20)
show("run", base=mine.base_model, is_lora=mine.is_lora, last=mine.last_checkpoint.checkpoint_id)
show("by path", same=wait(rest.get_training_run_by_tinker_path(path)).training_run_id == run)
every = wait(rest.list_user_checkpoints(limit=1))
assert every.cursor.total_count >= 2
show("checkpoints", of_run=listed(), page=len(every.checkpoints))
weights = wait(rest.get_weights_info_by_tinker_path(path))
show("weights", base=weights.base_model, is_lora=weights.is_lora, rank=weights.lora_rank)
session = run.partition(":")[0]
known = wait(rest.get_session(session))
assert session in wait(rest.list_sessions()).sessions and run in known.training_run_ids
metadata = getattr(known, "user_metadata", {"of": "the test"})  # 0.25 drops it
show("session", runs=len(known.training_run_ids), metadata=metadata)
wait(rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
ttl = [each.expires_at for each in wait(rest.list_checkpoints(run)).checkpoints]
wait(rest.set_checkpoint_ttl_from_tinker_path(path, None))
show("expiry", set=[each is not None for each in ttl])
show("refused: no kind", error=refused(lambda: rest.delete_checkpoint(run, "one")))
wait(rest.delete_checkpoint(run, "weights/one"))
show("deleted", left=listed())
gone = lambda: service.create_training_client_from_state(path)  # noqa: E731
show("refused: deleted", error=refused(gone))
wait(rest.delete_checkpoint_from_tinker_path(saved))
show("deleted", left=listed())
named = lambda: wait(service.create_sampling_client(model_path=saved))  # noqa: E731
show("refused: deleted weights", error=refused(named))
if VERSION >= (0, 30):
    wait(service.close("success"))
    show("closed")
