"""Prove what each family of models can do, and write docs/models.md and the table that runs read.

    python docs/generate_models.py

Each family takes about ten seconds.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track
from transformers import CONFIG_MAPPING

from nemorl.models.capabilities import CAPABILITIES, TESTED, Proofs, versions_here
from nemorl.parallel.proving import LIMIT, prove

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {}),
    "Llama 4 (text)": ("llama4_text", {}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with a window": ("mistral", {"sliding_window": 4096}),
    "Mixtral": ("mixtral", {}),
    "Qwen 2, 2.5": ("qwen2", {}),
    "Qwen 2 with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    ),
    "Qwen 3": ("qwen3", {}),
    "Qwen 3 MoE": ("qwen3_moe", {}),
    "Qwen 3 Next": ("qwen3_next", {}),
    "Qwen 3.5 (text)": ("qwen3_5_text", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3 (text)": ("gemma3_text", {}),
    "Phi 3, 4": ("phi3", {}),
    "GLM 4": ("glm4", {}),
    "OLMo 2": ("olmo2", {}),
    "SmolLM 3": ("smollm3", {}),
    "Granite": (
        "granite",
        {
            **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.0156},
        },
    ),
    "Cohere 2": ("cohere2", {}),
    "StarCoder 2": ("starcoder2", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek V3": ("deepseek_v3", {}),
    "Nemotron-H": ("nemotron_h", {}),
}
"""Model types, and what of their configurations is not transformers' default."""


def config_of(family: str) -> Any:
    """Return the Hugging Face configuration of a family."""
    kind, options = FAMILIES[family]
    return CONFIG_MAPPING[kind](**options)


def by_type(found: dict[str, Proofs]) -> dict[str, Proofs]:
    """Return for each model type what holds for all its families, with the largest difference."""
    table: dict[str, Proofs] = {}
    for family, proofs in found.items():
        before = table.get(FAMILIES[family][0], proofs)
        table[FAMILIES[family][0]] = {
            name: min(before[name], proof, key=lambda each: (each.holds, -(each.worst or 0)))
            for name, proof in proofs.items()
        }
    return table


def page(found: dict[str, Proofs]) -> str:
    """Return the generated part of the page."""
    names = list(CAPABILITIES)
    lines = ["| family | " + " | ".join(name.replace("_", " ") for name in names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    reasons: dict[tuple[str, str], list[str]] = {}
    for family, proofs in found.items():
        cells = []
        for name in names:
            cells.append(str(proofs[name]).replace("e-0", "e-") if proofs[name].holds else "–")
            if not proofs[name].holds:
                why = name.replace("_", " "), str(proofs[name]).replace("|", "\\|")
                reasons.setdefault(why, []).append(family)
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines += ["", "| does not hold | for | because |", "|---|---|---|"]
    for (name, reason), families in sorted(reasons.items()):
        lines.append(f"| {name} | {', '.join(families)} | {reason} |")
    return "\n".join(lines)


def main() -> None:
    found: dict[str, Proofs] = {
        family: prove(config_of(family)) for family in track(FAMILIES, "proving")
    }
    table = {
        kind: {name: asdict(proof) for name, proof in proofs.items()}
        for kind, proofs in by_type(found).items()
    }
    found_with = {"versions": versions_here(), "types": table}
    TESTED.write_text(json.dumps(found_with, indent=1) + "\n")
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(found)}\n\n{END}{after}")
    print(f"{PAGE}, {TESTED}: differences of at most {LIMIT:g} hold")


if __name__ == "__main__":
    main()
