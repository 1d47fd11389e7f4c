# /// script
# dependencies = ["verifiers==0.4.0", "uv", "pytest<9.1", "pytest-asyncio"]
# ///
"""Calculate through verifiers: its own program in a subprocess, behind its own server.

The row's `client` is eval, which relays requests, with a shell, or train, which posts tokens. Each
answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.assistant_messages[-1].content or ""))


class SumConfig(vf.TasksetConfig):
    question: str = ""
    answer: str = ""


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        data = Sum(idx=0, prompt=self.config.question, answer=self.config.answer)
        return [SumTask(data, self.config.task)]


__all__ = ["Sums"]


async def main(row: dict) -> None:
    client = {"type": row["client"], "base_url": os.environ["OPENAI_BASE_URL"]}
    client |= {"api_key_var": "OPENAI_API_KEY"}
    if row["client"] == "train":
        client |= {"renderer_model_name": row["tokenizer"]}  # without tools
    harness = {"id": "bash", "edit": False} if row["client"] == "eval" else {"id": "null"}
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    task = {"id": Path(__file__).stem, "question": row["question"], "answer": row["answer"]}
    with tempfile.TemporaryDirectory() as folder:
        config = EvalConfig(
            env={"taskset": task, "agent": agent},
            model="policy",
            client=client,
            rich=None,
            push=False,
            output_dir=Path(folder),
        )
        ((trace,),) = [each.traces for each in await run_eval(config)]
    for said in trace.assistant_messages:
        calls = [[call.name, json.loads(call.arguments)] for call in said.tool_calls or ()]
        print(json.dumps([said.content or "", *calls]))
    assert trace.ok, trace
    print(trace.reward)


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # uv
    asyncio.run(main(json.load(sys.stdin)))
