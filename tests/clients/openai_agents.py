# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""Calculate with a tool through openai-agents: a run, and a second one that goes on, streamed.

Each answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(row: dict) -> None:
    agent = Agent("calculator", instructions="Use your tool.", model="policy", tools=[add])
    first = await Runner.run(agent, row["question"])
    asked = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
    second = Runner.run_streamed(agent, asked)
    async for _ in second.stream_events():
        pass
    for reply in (*first.raw_responses, *second.raw_responses):
        text = [item.content[0].text for item in reply.output if item.type == "message"]
        calls = [item for item in reply.output if item.type == "function_call"]
        called = ([call.name, json.loads(call.arguments)] for call in calls)
        print(json.dumps(["".join(text), *called]))
    print(float(row["answer"] in second.final_output))


asyncio.run(main(json.load(sys.stdin)))
