# /// script
# dependencies = ["mini-swe-agent==2.4.6"]
# ///
"""Calculate in a shell through mini-swe-agent, which asks through litellm.

Each answer is printed as [text, [tool, arguments], …], and at the end the reward.
"""

import json
import os
import sys

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}
import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

litellm.suppress_debug_info = True  # which it prints
row = json.load(sys.stdin)
model = LitellmModel(model_name="openai/policy")
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="Use bash.",
    instance_template="{{task}}",
    step_limit=4,
)
end = agent.run(row["question"])
for said in agent.messages:
    if said["role"] == "assistant":
        called = [call["function"] for call in said["tool_calls"]]
        calls = [[call["name"], json.loads(call["arguments"])] for call in called]
        print(json.dumps([said["content"] or "", *calls]))
print(float(row["answer"] in end["submission"]))
