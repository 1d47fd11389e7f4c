"""Stop strings against brute force: all that was said, decoded anew after every token."""

import random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from nemorl.rollout.decoding import StopStrings
from tests.tiny_models import tiny_tokenizer

SPECIAL = [f"<{n}>" for n in range(8)]


def fast(vocabulary: list[str], decoder: Any) -> PreTrainedTokenizerFast:
    ids = {token: n for n, token in enumerate([*SPECIAL, *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=SPECIAL)


def metaspace() -> PreTrainedTokenizerFast:
    """As sentencepiece's: a text loses its first space."""
    return fast(["▁", "▁a", "a", "b", "▁b", "ab"], decoders.Metaspace())


def byte_level() -> PreTrainedTokenizerFast:
    """Whose tokens may be parts of a character; ids without a token have no text."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = ["".join(t for t, _ in alphabet.pre_tokenize_str(text)) for text in ("é", " ", "ab")]
    return fast(["a", "b", *tokens, *tokens[0]], decoders.ByteLevel())


TOKENIZERS = {
    "metaspace": (metaspace, ["ab", " a", "a b", "b  a", "bbb"]),
    "byte level": (byte_level, ["é", "ab", "aé", "éab é", " ", "ba"]),
    "slow": (ByT5Tokenizer, ["<=", "==", ">?<", "Ä", "?Ä="]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_they_are_found_when_the_whole_text_has_them(name):
    make, stops = TOKENIZERS[name]
    tokenizer, draw = make(), random.Random(0)
    finder, found = StopStrings(tokenizer), 0
    usual = [*range(63, 67), 198, 135] if name == "slow" else list(range(8, len(tokenizer)))
    silent = [0, 1, 2] if name == "slow" else [*range(8), len(tokenizer) + 3]
    for _ in range(300):
        share, wanted = draw.choice([0.0, 0.5, 0.9, 0.97]), draw.sample(stops, draw.randint(1, 2))
        tokens = [draw.choice(silent if draw.random() < share else usual) for _ in range(80)]
        for n in range(1, len(tokens) + 1):
            text = tokenizer.decode(tokens[:n], skip_special_tokens=True)
            expected = any(stop in text for stop in wanted)
            assert finder.end(tokens[:n], wanted) == expected, (tokens[:n], wanted)
            if expected:
                found += 1
                break
    assert found > 50


def test_what_is_decoded_does_not_grow_with_the_response():
    """Nor with special tokens, of which a model may say nothing but."""
    tokenizer = tiny_tokenizer()
    decoded: list[int] = []

    class Counting:
        def decode(self, token_ids, **options):
            decoded.append(len(token_ids))
            return tokenizer.decode(token_ids, **options)

    stops = StopStrings(Counting())
    for tokens in ([5] * 2000, [5] * 20 + [0] * 2000):
        decoded.clear()
        for n in range(1, len(tokens) + 1):
            assert not stops.end(tokens[:n], ["never"])
        assert sum(decoded) < 20 * len(tokens)
