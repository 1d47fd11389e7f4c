# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Calculate with a tool through Anthropic's client: messages, streamed, and their tokens counted.

Each answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import json
import sys

from anthropic import Anthropic

row, client = json.load(sys.stdin), Anthropic()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}

messages = [{"role": "user", "content": row["question"]}]
while True:
    asked = {"model": "policy", "system": "Be short.", "messages": messages, "tools": [ADD]}
    count = client.messages.count_tokens(**asked).input_tokens
    with client.messages.stream(max_tokens=256, **asked) as stream:
        reply = stream.get_final_message()
    assert reply.usage.input_tokens == count
    text = "".join(block.text for block in reply.content if block.type == "text")
    calls = [block for block in reply.content if block.type == "tool_use"]
    print(json.dumps([text, *([call.name, call.input] for call in calls)]))
    messages.append({"role": "assistant", "content": reply.content})
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": str(call.input["a"] + call.input["b"]),
        }
        for call in calls
    ]
    if not calls:
        break
    messages.append({"role": "user", "content": results})
print(float(row["answer"] in text))
