"""Small real tokenizers (a token a character; a token a word with the space before it), chat
templates of several habits, and conversations.
"""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{%"
    " generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content +"
    " '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{%"
    " endif %}" + CHATML
)
STRIPPING = CHATML.replace("m.content", "(m.content | trim)")
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else"
    " m.content.split('</think>')[-1]) }}{{ '<|im_end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops what was thought in earlier turns, as several reasoning models' templates do."""
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if"
    " add_generation_prompt %}assistant:{% endif %}"
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    turns = [(user, assistant)[number % 2](content) for number, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def _fast(model, pattern: str, template: str | None, **special) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "extra_special_tokens": ["<|im_start|>"],
    } | special
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    return fast


def character_tokenizer(template: str | None = CHATML, **special) -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    return _fast(models.WordLevel(vocabulary, unk_token="<pad>"), r"[\s\S]", template, **special)


def word_tokenizer(words: list[str], template: str | None) -> PreTrainedTokenizerFast:
    """One token a word with its leading space, and one for each line break."""
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys([*SPECIAL, "\n", *words]))
    }
    return _fast(models.WordLevel(vocabulary, unk_token="<pad>"), r" ?[^\s]+|\s", template)


def trained_text(tokenizer, example) -> list[str]:
    """The text of each run of trained tokens."""
    runs, current = [], []
    for token, trained in [*zip(example.input_ids, example.loss_mask, strict=True), (0, False)]:
        if trained:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs
