"""Rows under the names that the library knows, and the prompts and examples made of them."""

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nemorl.checks import closest, require, short, warn
from nemorl.data.example import Example
from nemorl.data.messages import tokenize_messages, tokenize_prompt, tokenize_prompt_response
from nemorl.data.rows import COLUMNS, Places, Row, StreamedRows, for_rows, shuffled
from nemorl.data.sources import as_known, known_set, read_rows, shards_of, sources_of
from nemorl.data.templates import PASSTHROUGH, RENAMED, Message


def parts_of(template: str, setting: str = "data.prompt_template") -> list[tuple[str, str | None]]:
    """Return a template as texts, each with the column that follows it.

    >>> parts_of("Q: {prompt} {{A}}")
    [('Q: ', 'prompt'), (' {', None), ('A}', None)]
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        parts = []
    names = [part[1:] for part in parts if part[1] is not None]
    require(
        bool(names) and all(name and not spec and not how for name, spec, how in names),
        setting,
        "must name the column of the prompt as {prompt}, or others in the same way",
        template,
        'write one like "Question: {prompt}", and {{ }} for braces that are text',
    )
    return [(text, name) for text, name, _, _ in parts]


def _with_prompt(row: Row, *, template: str | None, system: str | None, chat: bool) -> Row:
    """Return the row with its prompt in the template, then in a chat (see `load_rows`)."""
    found = row.but()
    if template is not None:
        found["prompt"] = "".join(
            text + ("" if name is None else _text_in(row, name))
            for text, name in parts_of(template)
        )
        found.pop("messages", None)
    if isinstance(text := found.get("prompt"), str):
        if chat:
            found["prompt"] = [{"role": "user", "content": text}]
        elif system is not None:
            raise ValueError(
                "data.system_prompt is for chats, but the prompt is a string: add --data.chat, or"
                " put the text into data.prompt_template"
            )
    if system is not None:
        for column in ("prompt", "messages", "chosen", "rejected"):
            first = _first_role(found.get(column))
            answers = column in ("chosen", "rejected") and first == "assistant"
            if first not in (None, "system", "developer") and not answers:
                found[column] = [{"role": "system", "content": system}, *found[column]]
    return found


def warn_of_strings(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> None:
    """Warn of prompts that are strings where the tokenizer has a chat template.

    >>> from transformers import ByT5Tokenizer
    >>> warn_of_strings([{"prompt": "1+1="}], ByT5Tokenizer())  # which has none
    """
    if getattr(tokenizer, "chat_template", None) in (None, "", PASSTHROUGH):
        return
    chats = ("messages", "response", "chosen")
    if any(
        isinstance(row.get("prompt"), str) and not any(_first_role(row.get(c)) for c in chats)
        for row in rows
    ):
        warn(
            "prompts are strings and given to the model as they are: --data.chat puts each into the"
            " tokenizer's chat template, as the user's message"
        )


def _text_in(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | int | float):
        got = f"{short(value)}: use another column, or remove the template"
        if column not in row:
            got = _columns(row, column)
        raise ValueError(
            f"data.prompt_template needs a text or number in the column {column!r}, got {got}"
        )
    return str(value)


def _columns(row: Row, wanted: str) -> str:
    there = [*map(str, row)]
    return f"the columns {', '.join(there)}{closest(wanted, there)}"


def _first_role(value: Any) -> Any:
    messages = isinstance(value, Sequence) and not isinstance(value, str) and len(value)
    first = value[0] if messages else None
    return first.get("role") if isinstance(first, Mapping) else None


def load_rows(
    source: Any,
    *,
    split: str | Sequence[str] = "train",
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    response_column: str = "response",
    answer_column: str = "answer",
    messages_column: str = "messages",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    margin_column: str = "margin",
    label_column: str = "label",
    environment_column: str = "environment",
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    chat: bool = False,
) -> list[Row]:
    """Return all rows of a source, or of a list of several, one behind the other.

    Args:
        source: a .jsonl, .json, .csv (values are text) or .parquet file; a folder of such files or
            of `save_to_disk`; a data set on the hub (`NAME:CONFIGURATION` where it has several); a
            list of dicts; a `datasets.Dataset` or `DatasetDict`; a `DataModule`.
        split: one for all sources or one for each; a source without splits is all "train".
        data_files: chooses files of a data set on the hub or in a folder.
        *_column: the source's name of a column, which it keeps besides. One of several sources may
            have the standard name instead. By default a row without `prompt` and `response` may
            have `input` and `output`, or `prompt` and `completion`, and a known set of the hub has
            its own columns and template (`nemorl.data.sources`).
        prompt_template: the prompt becomes this text with columns in it: "Question: {prompt}".
        system_prompt: a system message before messages that have none.
        chat: a prompt that is a string becomes the user's message.
    Raises: ValueError that names file and line of a malformed row, a missing column, or split.

    >>> load_rows([{"question": "1+1", "answer": "2"}], prompt_column="question")
    [{'question': '1+1', 'answer': '2', 'prompt': '1+1'}]
    """
    sources = sources_of(source)
    splits = [split] * len(sources) if isinstance(split, str) else list(split)
    if len(splits) != len(sources):
        raise ValueError(
            f"split must be one for all sources or one for each of them, {len(sources)}, got"
            f" {splits}"
        )
    complete = _completer(
        sources,
        prompt_template=prompt_template,
        system_prompt=system_prompt,
        chat=chat,
        prompt_column=prompt_column,
        response_column=response_column,
        answer_column=answer_column,
        messages_column=messages_column,
        chosen_column=chosen_column,
        rejected_column=rejected_column,
        margin_column=margin_column,
        label_column=label_column,
        environment_column=environment_column,
    )
    return [
        complete(row)
        for number, (part, own) in enumerate(zip(sources, splits, strict=True))
        for row in read_rows(part, split=own, data_files=data_files, number=number)
    ]


def stream_rows(
    source: Any, *, split: str = "train", seed: int = 0, shuffle_buffer: int = 0, **reading: Any
) -> StreamedRows:
    """Return the rows that `load_rows` returns, to be read as they are needed.

    shuffle_buffer: of how many rows the next one is drawn; 0: they stay in order.

    >>> rows = stream_rows([{"question": "1+1="}], prompt_column="question")
    >>> rows[0]["prompt"], rows[1]["prompt"]  # of the next epoch
    ('1+1=', '1+1=')
    """
    read = partial(shuffled, shards_of(source, split), seed=seed, shuffle_buffer=shuffle_buffer)
    return StreamedRows(Places(read), _completer(sources_of(source), **reading))


def _completer(
    sources: Sequence[Any],
    *,
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    chat: bool = False,
    **names: str,
) -> Callable[[Row], Row]:
    columns = {
        name: column for name in COLUMNS if (column := names.get(f"{name}_column", name)) != name
    }
    known, several = [*map(known_set, sources)], len(sources) > 1

    def complete(row: Row) -> Row:
        part, template = known[row.source], prompt_template
        if several and not isinstance(sources[row.source], str | Path):
            row = Row(row, origin=f"{row.origin} of data set {row.source + 1}", source=row.source)
        if part is not None:
            template = template or part.template
            row = as_known(row, part, given=[n for n, column in columns.items() if column in row])
        row = with_standard_names(_mapped(row, columns, several=several))
        prompted = partial(_with_prompt, template=template, system=system_prompt, chat=chat)
        return for_rows([row], prompted)[0]

    return complete


def with_standard_names(row: Row) -> Row:
    """Return a row with `prompt` and `response`, or `messages`, from other libraries' names.

    Also of Alpaca's rows (`instruction`, `input`, `output`) and ShareGPT's (`conversations` of
    `from` and `value`, maybe `system`).

    >>> with_standard_names(Row({"input": "1+1=", "output": "2"}))
    {'input': '1+1=', 'output': '2', 'prompt': '1+1=', 'response': '2'}
    >>> with_standard_names(Row({"conversations": [{"from": "human", "value": "Hi"}]}))["messages"]
    [{'role': 'user', 'content': 'Hi'}]
    """
    added: dict[str, Any] = {}
    if row.keys().isdisjoint(("prompt", "messages", "chosen", "completions")):
        added = _of_alpaca(row) or _of_sharegpt(row)
    judged = row.get("reward_model")  # verl's
    if isinstance(judged, Mapping) and "ground_truth" in judged and "ground_truth" not in row:
        added["ground_truth"] = judged["ground_truth"]
    if row.get("completions") is not None and row.get("context") is not None:
        context = row["context"]
        added["prompt"] = [context] if isinstance(context, Mapping) else context
    # Beside an instruction, `input` is not the prompt.
    if not {"messages", "instruction"} & row.keys():
        if row.keys().isdisjoint(("prompt", "context")) and "input" in row:
            added["prompt"] = row["input"]
        for name in ("output", "completion"):
            if "response" not in row and name in row:
                added.setdefault("response", row[name])
    return row.but(**added)


def _of_alpaca(row: Row) -> dict[str, Any]:
    if not {"instruction", "output"} <= row.keys():
        return {}
    prompt = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return {"prompt": prompt, "response": row.get("response", row["output"])}


def _of_sharegpt(row: Row) -> dict[str, Any]:
    turns: Any = row.get("conversations")
    if not are_mappings(turns, "from", "value"):
        return {}
    ours = {theirs: role for role, names in RENAMED.items() for theirs in names}
    said = [(ours.get(turn["from"], turn["from"]), turn["value"]) for turn in turns]
    if row.get("system") and said[0][0] != "system":
        said.insert(0, ("system", row["system"]))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def prompt_of(row: Mapping[str, Any]) -> str | list[Message]:
    """Return a row's `prompt` (text or messages), else its `messages` without a final answer.

    Raises: ValueError without either.

    >>> prompt_of({"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant"}]})
    [{'role': 'user', 'content': '1+1'}]
    """
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    if row.get("prompt") is not None:
        return messages_of(row["prompt"], "prompt")
    if row.get("messages") is None:
        raise ValueError(
            f"a row needs a prompt (text or messages) or messages, got columns {', '.join(row)};"
            " name its column with prompt_column"
        )
    messages = messages_of(row["messages"], "messages")
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def to_prompts(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, **template: Any
) -> Sequence[list[int]]:
    """Return the token ids of each row's prompt; a row's `tools` go to the chat template.

    `template` takes `tokenize_prompt`'s arguments. Raises: ValueError that names the row.

    >>> from transformers import ByT5Tokenizer
    >>> to_prompts([{"prompt": "ab"}], ByT5Tokenizer())
    [[100, 101]]
    """

    def prompt_ids(row: Mapping[str, Any]) -> list[int]:
        ids = tokenize_prompt(tokenizer, prompt_of(row), **with_tools(row, template))
        if not ids:
            raise ValueError(
                f"prompt must have at least one token, got {prompt_of(row)!r}: leave the row out,"
                " or begin prompts with a special token"
            )
        return ids

    return for_rows(rows, prompt_ids)


def to_examples(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_eos: bool = True, **template: Any
) -> Sequence[Example]:
    """Return each row as an example: all assistant turns of its `messages`, or its `response`.

    If prompt or response are messages, both go through the chat template with the row's `tools`;
    `template` takes `tokenize_messages`'s arguments, `add_eos` is about plain text.
    Raises: ValueError that names the row.

    >>> from transformers import ByT5Tokenizer
    >>> to_examples([{"prompt": "ab", "response": "c"}], ByT5Tokenizer())[0].input_ids
    [100, 101, 102, 1]
    """

    def example(row: Mapping[str, Any]) -> Example:
        if row.get("messages") is None:
            return answered(row, "response", tokenizer, add_eos=add_eos, template=template)
        messages = messages_of(row["messages"], "messages")
        return tokenize_messages(tokenizer, messages, add_eos=add_eos, **with_tools(row, template))

    return for_rows(rows, example)


def answered(
    row: Mapping[str, Any],
    column: str,
    tokenizer: Any,
    *,
    add_eos: bool,
    template: Mapping[str, Any],
) -> Example:
    """Return the row's prompt with the answer in `row[column]`, which is trained on.

    >>> from transformers import ByT5Tokenizer
    >>> row = {"prompt": "a", "response": "b"}
    >>> answered(row, "response", ByT5Tokenizer(), add_eos=False, template={}).loss_mask
    [False, True]
    """
    prompt, answer, options = prompt_of(row), row.get(column), with_tools(row, template)
    if isinstance(answer, str) and isinstance(prompt, str):
        return tokenize_prompt_response(tokenizer, prompt, answer, add_eos=add_eos)
    if not isinstance(answer, str | Sequence):
        raise ValueError(
            f"{column} must be text or messages, got {answer!r} (columns: {', '.join(row)}); name"
            f" its column with {column}_column (data.{column}_column)"
        )
    before, after = as_messages(prompt, "prompt", "user"), as_messages(answer, column)
    return tokenize_messages(
        tokenizer, [*before, *after], given=len(before), add_eos=add_eos, **options
    )


def as_messages(value: Any, column: str, role: str = "assistant") -> list[Message]:
    """Return text as one message, or a column's messages, checked.

    >>> as_messages("hello", "prompt", "user")
    [{'role': 'user', 'content': 'hello'}]
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return messages_of(value, column)


def messages_of(value: Any, column: str) -> list[Message]:
    """Return a column's messages, checked.

    >>> messages_of([{"role": "user", "content": "hello", "tool_calls": None}], "messages")
    [{'role': 'user', 'content': 'hello'}]
    """
    if not are_mappings(value, "role"):
        raise ValueError(
            f'{column} must be a list of messages like {{"role": "user", "content": "..."}}, got'
            f" {short(value)}"
        )
    # Arrow fills absent keys with None, and templates ask `"tool_calls" in message`.
    return [
        {key: part for key, part in message.items() if part is not None or key == "content"}
        for message in value
    ]


def with_tools(row: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments with the row's `tools` (a list, or its JSON text),
    unless they have tools.

    >>> with_tools({"tools": '[{"name": "add"}]'}, {"chat_template": None})
    {'chat_template': None, 'tools': [{'name': 'add'}]}
    """
    tools: Any = row.get("tools")
    if template.get("tools"):
        return dict(template)
    if isinstance(tools, str):
        with suppress(json.JSONDecodeError):
            tools = json.loads(tools)
    if tools not in (None, [], ()) and not are_mappings(tools):
        raise ValueError(f"tools must be a list of tools, or one as JSON text, got {short(tools)}")
    return {**template, "tools": [dict(tool) for tool in tools]} if tools else dict(template)


def are_mappings(value: Any, *keys: str) -> bool:
    """Return whether a value is a list, not empty, of mappings that have these keys.

    >>> are_mappings([{"role": "user"}], "role"), are_mappings([], "role")
    (True, False)
    """
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(part, Mapping) and {*keys} <= part.keys() for part in value)
    )


def _mapped(row: Row, columns: Mapping[str, str], *, several: bool) -> Row:
    found = {}
    for name, column in columns.items():
        if column in row:
            found[name] = row[column]
        elif not (several and name in row):
            raise ValueError(
                f"{name}_column (data.{name}_column) is {column!r}, but {row.origin} has"
                f" {_columns(row, column)}"
            )
    return row.but(**found)
