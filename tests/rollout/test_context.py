"""Laws over chat templates: what is trained on was sampled, and its context is the template's."""

import string
from copy import deepcopy
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from transformers import PreTrainedTokenizerFast

from nemorl.data.messages import tokenize_prompt
from nemorl.data.templates import PASSTHROUGH
from nemorl.rollout.context import Context
from nemorl.rollout.conversation import Turn, examples_of, turns_of
from nemorl.rollout.generation import Completion
from tests.rollout.chats import NAMES, OURS, tokenizer_of

SAFE = "".join(set(string.printable) - set("<>[]|{}")) + "é–"


ASKED = {"role": "user", "content": "1+1?"}
AGAIN = {"role": "user", "content": "sure?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SUM = {"role": "tool", "name": "add", "content": "7"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {name: tokenizer_of(name) for name in (*NAMES, *OURS)}


def said(
    tokenizer, text: str, *, ended: bool, stopped: bool = False, apart: bool = False
) -> Completion:
    """apart: each character is a token, which the tokenizer would not make of ab."""
    found = [tokenizer(each, add_special_tokens=False) for each in (text if apart else [text])]
    ids = tuple(token for each in found for token in each["input_ids"])
    ids += (tokenizer.eos_token_id,) * ended
    return Completion(
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        finish_reason="stop" if ended or stopped else "length",
        text=text,
    )


def begun(tokenizer, tools=(), log=(ASKED,)):
    """A context, the token ids of its prompt, and what `add` needs."""
    prompt = tokenizer.apply_chat_template([*log], add_generation_prompt=True)["input_ids"]
    context = Context(tokenizer, log, prompt)
    return context, *context.prompt_of(log, tools)


def trained(turns: list[Turn]) -> list[list[int]]:
    return [
        [token for token, own in zip(each.input_ids, each.loss_mask, strict=True) if own]
        for each in examples_of(turns)
    ]


def written(number: int) -> str:
    """A call, with the model's own spaces, as no template writes it."""
    return f'<tool_call>\n{{"name":"add",  "arguments": {{"a": {number}}}}}\n</tool_call>'


def bare(text: str) -> str:
    return "".join(text.split())


TEXTS = st.text(SAFE, min_size=1, max_size=12)
ANSWERS = st.one_of(
    TEXTS,
    st.sampled_from(["ab", " ab", "abab", written(1)]),
    TEXTS.map(lambda text: f"  {text}\n"),
    st.tuples(TEXTS, TEXTS).map(lambda two: f"<think>\n{two[0].strip()}\n</think>\n\n{two[1]}"),
)


class Counting:
    """A tokenizer that counts the tokens it makes of text, and the renderings of its template."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.renderings = tokenizer, 0, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        found = self.tokenizer(text, **options)
        self.tokens += len(found["input_ids"])
        return found

    def apply_chat_template(self, *given, **options):
        self.renderings += 1
        return self.tokenizer.apply_chat_template(*given, **options)


@dataclass(eq=False)
class Said:
    """An answer of the model."""

    turn: Turn
    log: list[dict]
    """As it is passed on."""
    plain: list[dict]
    """As a template sees it."""
    tools: list
    end: str
    """What is rendered up to its end, without spaces."""
    after: "Said | None"

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.turn.prompt, *self.turn.completion.token_ids)


class Tree(RuleBasedStateMachine):
    """Chats that go on from any answer, with retries, tools and other conversations between."""

    def __init__(self, tokenizer):
        super().__init__()
        self.plain = tokenizer.chat_template == PASSTHROUGH
        self.tokenizer, self.said = Counting(tokenizer), list[Said]()
        self.prompt = tokenize_prompt(tokenizer, [ASKED])
        self.context = Context(self.tokenizer, [ASKED], self.prompt, plain=self.plain)
        try:
            begun(tokenizer, TOOLS)
            self.tools = TOOLS
        except ValueError:
            self.tools = []

    @rule(
        place=st.integers(0, 5),
        question=st.sampled_from([None, None, "why?", "B?"]) | TEXTS,
        answer=ANSWERS,
        ended=st.booleans(),
        apart=st.booleans(),
        copied=st.booleans(),
        tools=st.booleans(),
    )
    def chat(self, place, question, answer, ended, apart, copied, tools):
        """place: of the answer that the chat goes on from, from the last; 0: it begins. question:
        None asks the same again, and hears the same. copied: other dicts are passed than those
        returned.
        """
        usable, log, plain = (self.tools if tools else []), list[dict](), list[dict]()
        if place and self.said:
            before = self.said[-1 - (place - 1) % len(self.said)]
            cut = None if question else -1
            log, plain = before.log[:cut], before.plain[:cut]
            answer = answer if question else before.turn.completion.text
        if question or not log:
            asked = {"role": "user", "content": question} if question else ASKED
            log, plain = [*log, asked], [*plain, asked]
        log = deepcopy(log) if copied else log
        self.context.prompt_of(log, usable)  # one that is not answered changes nothing
        made = self.tokenizer.tokens
        tokens, asked = self.context.prompt_of(log, usable)
        made, rendered = self.tokenizer.tokens - made, self.rendered(plain, usable)
        assert bare(self.tokenizer.decode(tokens, skip_special_tokens=self.plain)) == rendered
        after = self.longest(log, usable)
        while after and not rendered.startswith(after.end):
            after = after.after
        if log == [ASKED] and not usable:
            assert tokens == tuple(self.prompt)
        elif after:
            assert tokens[: len(after.tokens)] == after.tokens
            assert made == len(tokens) - len(after.tokens), "sampled tokens were made again"
        completion = said(self.tokenizer.tokenizer, answer, ended=ended, apart=apart)
        message = self.context.add(tokens, asked, completion)
        log = [*log, message]
        end = rendered + bare(answer)
        end += self.tokenizer.eos_token if ended and not self.plain else ""
        plain = [*plain, {"role": "assistant", "content": answer.strip() or answer}]
        turn = Turn(prompt=tokens, completion=completion)
        self.said.append(Said(turn, log, plain, usable, end, after))

    def rendered(self, plain, tools):
        if self.plain:
            return bare("".join(each["content"] for each in plain))
        options = {"tools": tools} if tools else {}
        whole = self.tokenizer.tokenizer.apply_chat_template(
            plain, add_generation_prompt=True, tokenize=False, **options
        )
        return bare(whole)

    def longest(self, log, tools):
        found = [
            each for each in self.said if each.tools == tools and log[: len(each.log)] == each.log
        ]
        most = max((len(each.log) for each in found), default=0)
        found = [each for each in found if len(each.log) == most]
        same = (each for each in found if each.log[-1] is log[most - 1])
        return next(same, found[-1] if found else None)

    def teardown(self):
        turns = [each.turn for each in self.said]
        rows, numbers = examples_of(turns), turns_of(turns)
        assert self.tokenizer.renderings <= 9 * len(turns)
        trained = dict[int, list[int]]()
        for row in rows:
            own, numbers = numbers[: row.num_tokens], numbers[row.num_tokens :]
            assert [number > 0 for number in own] == row.loss_mask
            for number, token in zip(own, row.input_ids, strict=True):
                trained.setdefault(number, []).append(token)
        for number, each in enumerate(self.said, 1):
            assert tuple(trained[number]) == each.turn.completion.token_ids
            assert any(tuple(row.input_ids[: len(each.tokens)]) == each.tokens for row in rows)


@pytest.mark.parametrize("name", [*NAMES, *OURS, "plain"])
def test_what_was_sampled_stays_in_every_tree_of_chats(tokenizers, name):
    """And is trained on once, in the template's own context up to white space around it. A segment
    goes on wherever the template renders what was before as it did then, and only there.
    """
    tokenizer = tokenizers[name] if name != "plain" else tokenizer_of("chatml")
    if name == "plain":
        tokenizer.chat_template = PASSTHROUGH
    options = settings(max_examples=12, stateful_step_count=12)
    run_state_machine_as_test(lambda: Tree(tokenizer), settings=options)


@pytest.mark.parametrize("ended", [True, False])
def test_answers_in_channels_go_on_as_their_template_has_them(tokenizers, ended: bool):
    """gpt-oss: the final answer is the content, and reasoning is left out of the next prompt."""
    tokenizer = tokenizers["gptoss"]
    context, tokens, asked = begun(tokenizer)
    text = "<|channel|>analysis<|message|>one < two<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>2"
    answer = said(tokenizer, text, ended=ended)
    message = context.add(tokens, asked, answer)
    assert message == {"role": "assistant", "content": "2", "thinking": "one < two"}
    after, _ = context.prompt_of([ASKED, message, AGAIN])
    plain = [ASKED, {"role": "assistant", "content": "2"}, AGAIN]
    whole = tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert list(after) == whole
    turns = [Turn(prompt=tokens, completion=answer), Turn(prompt=after, completion=answer)]
    assert trained(turns) == [list(answer.token_ids)] * 2


def test_text_that_looks_like_channels_stays_where_the_template_has_none(tokenizers):
    context, tokens, asked = begun(tokenizers["chatml"])
    text = "so<|channel|>final<|message|>2"
    message = context.add(tokens, asked, said(tokenizers["chatml"], text, ended=True))
    assert message == {"role": "assistant", "content": text}


def test_what_is_said_in_channels_ends_at_its_stop_string(tokenizers):
    context, tokens, asked = begun(tokenizers["gptoss"])
    text = "<|channel|>final<|message|>so <search>cats</search>"
    answer = said(tokenizers["gptoss"], text, ended=False)
    message = context.add(tokens, asked, answer, ["</search>"])
    assert message["content"] == "so <search>cats"
    assert message["stop_string"] == "</search>"


def test_an_end_token_without_a_name_ends_a_call():
    """Llama 3.1's <|eom_id|> is special, but in no list of the tokenizer's."""
    tokenizer = tokenizer_of("llama3_1", listed=False)
    assert "<|eom_id|>" not in tokenizer.all_special_tokens
    context, tokens, asked = begun(tokenizer, TOOLS)
    text = '<|python_tag|>{"name": "add", "parameters": {}}<|eom_id|>'
    message = context.add(tokens, asked, said(tokenizer, text, ended=False, stopped=True))
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


@pytest.mark.parametrize(("name", "role"), [("gemma", "referee"), ("phi3", "tool")])
def test_an_observation_that_the_template_does_not_render_is_an_error(tokenizers, name, role):
    context, tokens, asked = begun(tokenizers[name])
    answer = context.add(tokens, asked, said(tokenizers[name], "2", ended=True))
    with pytest.raises(ValueError, match=f"the chat template .*{role}"):
        context.prompt_of([ASKED, answer, {"role": role, "content": "It rains."}])


def test_a_template_without_tools_is_an_error(tokenizers):
    with pytest.raises(ValueError, match="the chat template leaves out the tools: choose"):
        begun(tokenizers["gemma"], TOOLS)


def test_answers_that_come_in_another_order_belong_to_their_own_prompts(tokenizers):
    """Two requests at once: going on with the first has its tokens, not those of the last."""
    tokenizer = tokenizers["qwen2_5"]
    context = Context(tokenizer, [{"role": "user", "content": "?"}], [1])
    logs = [[{"role": "user", "content": text}] for text in ("AAAA?", "BBBB?")]
    both = [context.prompt_of(log) for log in logs]
    answer = said(tokenizer, "yes", ended=True)
    for log, (tokens, asked) in reversed(list(zip(logs, both, strict=True))):
        log += [context.add(tokens, asked, answer), AGAIN]
    for log, (tokens, _) in zip(logs, both, strict=True):
        after, _ = context.prompt_of(log)
        text = tokenizer.decode(list(after))
        assert log[0]["content"] in text and text.count("yes") == 1
        kept = (*tokens, *answer.token_ids)
        assert after[: len(kept)] == kept


def test_calls_stay_as_they_were_written_where_earlier_messages_are_dropped(tokenizers):
    tokenizer = tokenizers["qwen2_5"]
    log = [ASKED]
    context = Context(tokenizer, log, [1])
    for number in (1, 2):
        tokens, asked = context.prompt_of(log, TOOLS)
        message = context.add(tokens, asked, said(tokenizer, written(number), ended=True))
        log = [*log, message, SUM]
    after, _ = context.prompt_of([{"role": "user", "content": "In short."}, *log[3:]], TOOLS)
    assert tokenizer.decode(list(after)).count('"name":"add",  "arguments"') == 1
    assert '"add", "arguments"' not in tokenizer.decode(list(after))


def test_an_answer_of_the_row_is_none_of_the_models(tokenizers):
    """The model says B, and then what an example in the prompt says, too."""
    tokenizer = tokenizers["qwen2_5"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    example = {"role": "assistant", "content": written(1), "tool_calls": [call]}
    log = [ASKED, example, {"role": "user", "content": "2+2?"}]
    context = Context(tokenizer, log, [1])
    for number in (2, 1):
        tokens, asked = context.prompt_of(log, TOOLS)
        completion = said(tokenizer, written(number), ended=True)
        message = context.add(tokens, asked, completion)
        log = [*log, message, SUM]
    assert message == example
    after, _ = context.prompt_of(log, TOOLS)
    kept = (*tokens, *completion.token_ids)
    assert after[: len(kept)] == kept
