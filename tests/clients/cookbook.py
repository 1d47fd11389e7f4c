# /// script
# dependencies = ["tinker==0.38.0", "tinker-cookbook[math-rl]==0.5.8", "torch==2.13.0"]
# ///
"""Run what tinker-cookbook has no command for, with its own parts.

cookbook.py supervised FILE.jsonl BATCH_SIZE key=value …   its supervised loop over a local file
cookbook.py evaluate MODEL RENDERER [tinker://WEIGHTS …]   reward of other sums
"""

import asyncio
import json
import sys

import chz
import tinker
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

HELD_OUT = 10_000
"""A batch that no training reaches: a run has 100."""


def supervised(file: str, batch_size: str, *settings: str) -> None:
    given = dict(each.split("=", 1) for each in settings)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=given["model_name"],
        renderer_name=given["renderer_name"],
        max_length=1024,
        batch_size=int(batch_size),
        train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    data = FromConversationFileBuilder(common_config=common, file_path=file)
    blueprint = chz.Blueprint(train.Config).apply({"dataset_builder": data})
    asyncio.run(train.main(blueprint.make_from_argv([*settings])))


async def evaluate(model: str, renderer: str, *paths: str) -> None:
    renderer = get_renderer(renderer, tokenizer=get_tokenizer(model))
    dataset = ArithmeticDataset(batch_size=64, renderer=renderer, group_size=1)
    service = tinker.ServiceClient()
    for path in paths:
        client = await service.create_sampling_client(model_path=path)
        for temperature in (1.0, 0.0):
            policy = TinkerTokenCompleter(client, max_tokens=20, temperature=temperature)
            rollouts = [do_group_rollout(each, policy) for each in dataset.get_batch(HELD_OUT)]
            rewards = [each.get_total_rewards()[0] for each in await asyncio.gather(*rollouts)]
            print(json.dumps(sum(rewards) / len(rewards)))


if sys.argv[1] == "supervised":
    supervised(*sys.argv[2:])
else:
    asyncio.run(evaluate(*sys.argv[2:]))
