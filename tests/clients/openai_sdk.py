# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""Calculate with a tool through OpenAI's client: chat completions, then streamed responses.

Each answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import json
import sys

from openai import OpenAI

row, client = json.load(sys.stdin), OpenAI()
assert [model.id for model in client.models.list()] == ["policy"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}

messages = [{"role": "user", "content": row["question"]}]
while True:
    reply = client.chat.completions.create(
        model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
    )
    said = reply.choices[0].message
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in said.tool_calls or ()
    ]
    print(json.dumps([said.content or "", *calls]))
    messages.append(said)
    for call, (_, arguments) in zip(said.tool_calls or (), calls, strict=True):
        result = str(arguments["a"] + arguments["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not calls:
        break

asked, last = row["question"], None
while asked:
    with client.responses.stream(
        model="policy", input=asked, previous_response_id=last, tools=[{"type": "function", **ADD}]
    ) as stream:
        reply = stream.get_final_response()
    last = reply.id
    calls = [item for item in reply.output if item.type == "function_call"]
    print(json.dumps([reply.output_text, *([c.name, json.loads(c.arguments)] for c in calls)]))
    asked = [
        {"type": "function_call_output", "call_id": call.call_id, "output": row["answer"]}
        for call in calls
    ]
print(float(row["answer"] in said.content and row["answer"] in reply.output_text))
