"""Chat templates of models, and an engine that follows a script."""

import json
import re
import string
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemorl.rollout.collect import Rollouts, collect
from nemorl.rollout.conversation import Limits, Prompts
from nemorl.rollout.generation import Completion, SamplingParams
from nemorl.rollout.wrapped import as_generation_backend
from tests.data.tokenizers_small import CHATML, FORGETFUL, STRIPPING

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content +"
    " ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral 7B Instruct's: a space before an answer, which is trimmed."""
NAMES = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "gptoss": "<|end|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "glm4moe": "<|user|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
"""Templates of models, by TRL's names, and the token that ends an answer."""
OURS = {"chatml": CHATML, "stripping": STRIPPING, "forgetful": FORGETFUL, "mistral": MISTRAL}
SPECIAL = re.compile(r"<[|｜][^|｜<>\n]+[|｜]>|</?s>|<(?:start|end)_of_turn>|<[be]os>|\[/?INST\]")


def text_of(name: str) -> str:
    if name in OURS:
        return OURS[name]
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer_of(name: str, *, listed: bool = True) -> PreTrainedTokenizerFast:
    """A token a character, one for ab, and one for each special token of the template, `listed` or
    not.
    """
    template, end = text_of(name), NAMES.get(name, "<|im_end|>" if name != "mistral" else "</s>")
    special = sorted({end, "<|im_start|>", "<bos>", "<pad>", *SPECIAL.findall(template)})
    letters = dict.fromkeys([*special, *string.printable, "é", "–", "ab"])
    vocabulary = {token: number for number, token in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    named = ("<pad>", "<bos>", end)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=end,
        extra_special_tokens=[each for each in special if listed and each not in named],
    )
    fast.chat_template = template
    return fast


TOKENIZER = tokenizer_of("qwen2_5")
SAMPLING = SamplingParams(n=2, max_new_tokens=200)


class Scripted:
    """An engine that answers text with text."""

    policy_version = 1

    def __init__(self, answer: Callable[[str], str], tokenizer: Any = TOKENIZER) -> None:
        self.answer, self.tokenizer = answer, tokenizer

    async def sample(self, prompt, params):
        text = self.answer(self.tokenizer.decode(list(prompt)))
        ids = (*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id)
        said = Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            finish_reason="stop",
            text=text,
            tokenizer=self.tokenizer,
        )
        return [said] * params.n

    def setup(self, config):
        pass

    def update_weights(self, source):
        pass

    def shutdown(self):
        pass


def call(name: str, **arguments) -> str:
    asked = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{asked}\n</tool_call>"


def played(
    environment,
    answer: Callable[[str], str],
    *rows: dict,
    tokenizer: Any = TOKENIZER,
    sampling: SamplingParams = SAMPLING,
    **limits,
) -> Rollouts:
    rows = [{"prompt": [{"role": "user", "content": "Go."}], **row} for row in rows or ({},)]
    ids = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        for row in rows
    ]
    prompts = Prompts(rows, ids, tokenizer=tokenizer, limits=Limits(**limits))
    generator = as_generation_backend(Scripted(answer, tokenizer))
    return collect(generator, environment, prompts, sampling, seed=1)
