# /// script
# dependencies = ["inspect-ai==0.3.285", "openai==3.57.0"]
# ///
"""Ask questions through inspect-ai, greedily: python inspect_sums.py < rows, a JSON list.

What is answered to each is printed as JSON, and at the end the accuracy.
"""

import json
import os
import sys

os.environ |= {"HERE_BASE_URL": os.environ["OPENAI_BASE_URL"]}
os.environ |= {"HERE_API_KEY": os.environ["OPENAI_API_KEY"]}
from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

rows = json.load(sys.stdin)
samples = [Sample(input=row["question"], target=row["answer"]) for row in rows]
task = Task(dataset=MemoryDataset(samples), solver=generate(), scorer=includes())
model, folder = f"openai-api/here/{sys.argv[1]}", sys.argv[2]
(log,) = eval(
    task, model=model, display="none", log_dir=folder, temperature=0.0, max_tokens=int(sys.argv[3])
)
assert log.status == "success", log.error
print(json.dumps([sample.output.completion for sample in log.samples]))
print(log.results.scores[0].metrics["accuracy"].value)
