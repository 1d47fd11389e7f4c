"""Draw docs/agents.png: an agent on openai-agents learns to call its tool (examples/agent.py).

python tools/agent_figure.py runs/agent-0 runs/agent-1 runs/agent-2
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
for run in map(Path, sys.argv[1:]):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rewards = [line["reward"] for line in lines if line["phase"] == "train"]
    before, after = json.loads((run / "held_out.json").read_text())
    seed = run.name.rpartition("-")[2]
    left.plot(range(1, len(rewards) + 1), rewards, marker="o", label=f"seed {seed}")
    right.plot(["before", "after"], [before, after], marker="o")
    print(f"seed {seed}: {before:.2f} -> {after:.2f}")
left.set(xlabel="step", ylabel="right answers", title="in training", ylim=(0, 1.03))
right.set(title="held out", xlim=(-0.4, 1.4))
left.legend(loc="lower right", frameon=False)
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
figure.savefig(Path(__file__).parent.parent / "docs" / "agents.png", dpi=130)
