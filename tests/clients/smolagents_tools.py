# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""Calculate with a tool through smolagents, which ends by the tool final_answer.

Each answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import json
import os
import sys

from smolagents import ActionStep, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


row = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel("policy", api_base=url, api_key=key)
agent = ToolCallingAgent([add], model, max_steps=3, verbosity_level=0)
answer = agent.run(row["question"])
for step in agent.memory.steps:
    if isinstance(step, ActionStep):
        said = step.model_output_message
        calls = [[call.function.name, call.function.arguments] for call in said.tool_calls]
        print(json.dumps([said.content or "", *calls]))
print(float(row["answer"] in str(answer)))
