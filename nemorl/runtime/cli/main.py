"""The command line. Settings come in layers: defaults < preset < --config file.yaml < flags.

Nothing here imports torch before the settings are known to be good.
"""

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from nemorl.checks import closest, require, warn
from nemorl.data.datasets import load_rows, prompt_of
from nemorl.data.rows import for_rows
from nemorl.data.sources import first_rows, known_set, sources_of
from nemorl.parallel.planner.config import PlanConfig
from nemorl.rollout.calls import ExitInUserCode
from nemorl.rollout.user_code import module_of
from nemorl.runtime.cli.commands import COMMANDS
from nemorl.runtime.cli.settings import (
    REWARDED,
    SAMPLED,
    EvalConfig,
    ExportConfig,
    LoadedConfig,
    print_settings_of_run,
    settings_of_run,
    used_by_plan,
)
from nemorl.runtime.config.base import (
    BaseConfig,
    DataConfig,
    RewardConfig,
    require_files,
    require_rows,
)
from nemorl.runtime.config.flags import given, help_of, in_full, names_of, parse_flags, peek
from nemorl.runtime.config.grpo import DESCRIPTIONS, PRESETS, GRPOConfig, of_preset
from nemorl.runtime.config.spellings import algorithm_hint
from nemorl.runtime.config.tree import (
    Setting,
    construct,
    dump_yaml,
    flat,
    layer,
    leaves,
    nested,
    require_secrets,
    unions,
    unused,
    values,
    yaml_layer,
)
from nemorl.runtime.config.yaml_io import CODE, Trust, read
from nemorl.runtime.ranks import is_follower, torchrun_size
from nemorl.runtime.run.registry import ALGORITHMS, algorithm_of, require_names
from nemorl.runtime.store.directory import RunDirectory, check_algorithm, script_with, version_of
from nemorl.runtime.store.files import ReceiptError, memory_advice
from nemorl.runtime.watch.callbacks import Terminated

Config = TypeVar("Config", bound=BaseConfig)
PLUMBING = tuple(
    str(Path(os.__file__).parent / name)
    for name in ("asyncio", "concurrent", "contextlib.py", "threading.py")
)
"""The standard library's, which call functions of the user's."""
SCRIPTS: dict[str, type[BaseConfig]] = {}
"""The configs of scripts that have called `cli`."""
COMMON = {
    "model.path",
    "data.train",
    "data.validation",
    "data.chat",
    "data.max_total_sequence_length",
    "optimizer.lr",
    "lora.rank",
    "parallel.dp_shard",
    "generation.backend",
    "generation.max_new_tokens",
    "generation.temperature",
    "run.dir",
    "run.resume",
    "run.val_period",
    "loss.name",
    "advantage.name",
    "parallel.tp",
    "rollout.environment",
    "async.max_staleness",
    "kl.coef",
    "teacher.model",
    "teacher.engine",
    "distillation.name",
    "critic.model",
    "critic.warmup_steps",
    "advantage.lam",
}
"""Settings of sections that `--help` shows."""
RARE = {
    "reward_weights",
    "reward_kwargs",
    "reduction",
    "train_global_batch_size",
    "num_updates_per_batch",
    "dynamic_sampling",
    "max_sampling_rounds",
    "entropy_coef",
    "sft_coef",
    "sft_reduction",
    "reference",
}
"""Settings in no section that it does not show."""

HELP = """\
nemorl: reinforcement learning and fine-tuning of language models

usage: nemorl [--import MODULE] COMMAND [OPTIONS]

commands
{commands}

train a model; each run writes a folder with its metrics, checkpoints and the model (hf/)
  nemorl sft  --model.path Qwen/Qwen3-0.6B --data.train demos.jsonl --run.dir runs/sft
  nemorl grpo --model.path runs/sft --data.train problems.jsonl --run.dir runs/rl
  nemorl dpo  --model.path runs/sft --data.train pairs.jsonl --run.dir runs/dpo
  nemorl rm   --model.path runs/sft --data.train pairs.jsonl --run.dir runs/rm
  nemorl distill --model.path small --data.train prompts.jsonl --teacher.model runs/rl
  nemorl grpo --config my.yaml --parallel.dp-shard 4       one model on four devices

resume an interrupted run with its saved settings
  nemorl grpo --run.dir runs/rl --run.resume

keep settings in a file (flags override the file; the file overrides the preset)
  nemorl grpo --preset dapo --print-config > my.yaml
  nemorl grpo --config my.yaml --optimizer.lr 1e-6

use what was trained
  nemorl eval --model runs/rl --validation test.jsonl --output answers.jsonl
  nemorl eval --model runs/rl --validation openai/gsm8k    a set that is known on the hub
  nemorl compare before.jsonl after.jsonl                  answers of eval, by a paired test
  nemorl generate --model runs/rl --prompt "12+34=" -n 4 --temperature 0.7
  nemorl serve runs/rl                                     for agents, at a URL like OpenAI's
  nemorl report runs/rl                                    curves and samples as a web page
  nemorl report runs/sft runs/rl                           the same of several runs, side by side
  nemorl verify runs/rl                                    its groups and its receipts

find out how a model fits on GPUs, and how fast each way is
  nemorl plan --model Qwen/Qwen3-32B --gpus 16 --gpu-memory 80

find out what nemorl can do with a model (packing, LoRA, FSDP2, …), without its weights
  nemorl models check google/gemma-3-1b-it

data: one JSON object a line; nemorl data example FILE writes some, data inspect shows them
  grpo, ppo    {{"prompt": "12+34=", "answer": "46"}}
  sft          {{"prompt": "12+34=", "response": "46"}}
  dpo, rm      {{"prompt": "12+34=", "chosen": "46", "rejected": "47"}}

nemorl COMMAND --help shows the usual settings, --help SECTION one section, --help all everything.
--import my_module makes what your file registers available by name: algorithms (as commands),
backends, loggers. NEMORL_TRACEBACK=1 shows where an error comes from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 done, 1 failed, 2 wrong settings or input, 130
    interrupted, 143 terminated. Only rank 0 prints.
    """
    if not is_follower():
        try:
            code = _main(argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # nobody reads the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    command, *args = typed = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    while command == "--import":
        if not args or args[0].startswith("-"):
            return _fail("nemorl", "--import must name a module: nemorl --import MODULE COMMAND", 2)
        module, command, *args = [*args, *["--help"] * (2 - len(args))]
        try:
            module_of(module, "--import")
        except (ValueError, RuntimeError) as error:
            return _fail("nemorl", str(error), 2)
    if args and f"{command} {args[0]}" in COMMANDS:
        command = f"{command} {args.pop(0)}"
    parts = [name for name in COMMANDS if name.startswith(f"{command} ")]
    if parts and (not args or args[0] in ("-h", "--help")):
        print(f"usage: nemorl {command} COMMAND [OPTIONS]\n\n{_commands(parts)}")
        return 0
    if command in ("-h", "--help", "help"):
        print(HELP.format(commands=_commands()), end="")
        return 0
    if command in ("-V", "--version"):
        print(f"nemorl {version_of('nemorl')}")
        return 0
    known = [*ALGORITHMS, *COMMANDS]
    if command not in known:
        command = " ".join([command, *args[:1]]) if parts else command
        hint = algorithm_hint(command, known) or "."
        return _fail(
            "nemorl", f"unknown command {command!r}{hint} Commands: {', '.join(parts or known)}", 2
        )
    shown = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        return _execute(command, args, typed=("nemorl", *typed))
    finally:
        warnings.formatwarning = shown


def cli(config: type[Config], args: Sequence[str] | None = None) -> Config:
    """Return the settings of a script from its flags (None: those of the process), with `--help`,
    `--config`, `--run.resume` and errors as of `nemorl`'s commands.

    Raises: SystemExit where there is nothing to run.
    """
    command, found = Path(sys.argv[0]).name, list[Config]()
    SCRIPTS[command] = config
    args = sys.argv[1:] if args is None else args
    code = _execute(command, args, found.append, typed=("python", sys.argv[0], *args))
    if not found:
        raise SystemExit(code)
    return found[0]


def _execute(
    command: str,
    args: Sequence[str],
    use: Callable[[Any], None] | None = None,
    *,
    typed: tuple[str, ...],
) -> int:
    prog, config = _prog(command), None
    try:
        config = parse(command, args, typed)
        if config is None or (is_follower() and command in COMMANDS):
            return 0
        _require_inputs(command, config)
        if use is not None:
            use(config)
        elif command in COMMANDS:
            COMMANDS[command].execute(config)
        else:
            from nemorl.runtime.run import open_run

            open_run.run(config)
        return 0
    except Terminated as stop:
        return _fail(prog, "\n".join(["terminated", *_notes(stop)]), 143)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as stop:
        return _fail(prog, "\n".join(["interrupted", *_notes(stop)]), 130)
    except BrokenPipeError:
        raise
    except Exception as error:
        kinds = ValueError | OSError | FloatingPointError | ExitInUserCode | ReceiptError
        expected = isinstance(error, kinds) or memory_advice(error) is not None
        if os.environ.get("NEMORL_TRACEBACK") or not (expected or _of_the_users(error)):
            raise
        return _fail(
            prog,
            _message(error, parsed=config is not None),
            2 if isinstance(error, ValueError) else 1,
        )


def _message(error: Exception, *, parsed: bool) -> str:
    kind, ours = "", str(Path(__file__).parents[2])
    frames = traceback.extract_tb(error.__traceback__)
    if _of_the_users(error):
        kind = f"{type(error).__name__}: "
        theirs = [frame for frame in frames if not frame.filename.startswith((ours, *PLUMBING))]
        print(*traceback.format_list(theirs), sep="", end="", file=sys.stderr)
    clear = frames[-1].filename.startswith(ours) and not isinstance(error, ExitInUserCode)
    hint = " (NEMORL_TRACEBACK=1 shows where this came from)" if parsed and not clear else ""
    return "\n".join([f"{kind}{error}", *_notes(error)]) + hint


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if not note.startswith("in worker ")]


def _of_the_users(error: BaseException) -> bool:
    begins = ("This was reward ", "This was environment ", "This ended ")
    return any(note.startswith(begins) for note in _notes(error))


def parse(command: str, args: Sequence[str], typed: tuple[str, ...] = ()) -> Any:
    """Return the checked config of a command; None where --print-config has printed it."""

    cls = _config_of(command)
    if command == "serve" and args and not args[0].startswith("-"):
        args = ["--model.path", *args]
    raw = args
    # Again below, when the settings of functions of the user's are known.
    args = in_full(cls, raw, names_of(cls), lenient=True)
    tree = of_preset(cls, next(reversed(peek(args, "--preset")), None))
    paths = peek(args, "--config") or _config_of_resumed_run(command, args)
    trust = _trust(args, typed)
    if len(paths) > 1:
        warn(f"of several --config the later wins: {' < '.join(paths)}")
    of_run, known = {}, list[bool]()
    if issubclass(cls, LoadedConfig):
        files = [flat(read(path)[0]) for path in paths]
        models = [file.get("model.path") for file in files]
        model = str([None, *models, *peek(args, "--model.path")][-1] or "")
        known = [known_set(each) is not None for each in _validation_sets(args, files)]
        without: tuple[str, ...] = REWARDED if peek(args, "--reward") else ()
        if peek(args, "--choices") or any("choices" in file for file in files):
            without = SAMPLED
        of_run = settings_of_run(cls, model, trust, without=without, known=all(known))
    tree = layer(cls, tree, nested(of_run))
    for path in paths:
        tree = yaml_layer(cls, tree, path, trust, used=used_by_plan if cls is PlanConfig else dict)
    shown = {*COMMON}
    for section in unions(cls):
        for name in peek(args, f"--{section}"):
            tree = layer(cls, tree, {section: {"name": name}})
            shown |= {key for key in leaves(cls) if key.startswith(f"{section}.")}
    args = in_full(cls, raw, names_of(cls))
    for section in unions(cls):
        _refuse_other_variants(cls, section, tree[section]["name"], args)
    usual = values(cls, {})
    shown |= {key for key, value in values(cls, tree).items() if value != usual.get(key)}
    if text := _help(command, cls, args, tree, shown):
        print(text, end="")
        return None
    tree, others = parse_flags(cls, tree, args, prog=_prog(command), extra=_extra(cls))
    config = construct(cls, tree)
    if others["print_config"]:
        _require_names_and_rows(config, elsewhere=True)
        print(dump_yaml(config, comments=True), end="")
        return None
    require_secrets(config)
    if of_run:
        print_settings_of_run(of_run, config, known)
    return config


def _validation_sets(args: Sequence[str], files: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    flag = "--data.validation"
    sets = [file.get("data.validation") for file in files] + [peek(args, flag)]
    if flag in args:
        sets.append([*takewhile(lambda each: each[:1] != "-", args[args.index(flag) + 1 :])])
    return sources_of(next(filter(None, reversed(sets)), None))


def _trust(args: Sequence[str], typed: tuple[str, ...]) -> Trust:
    last = {argument.replace("-no-", "-"): argument for argument in args}
    on = {flag for flag, argument in last.items() if flag == argument}
    prints = bool(on & {"-h", "--help", "--print-config"})
    runs: Any = "all" if "--trust-code" in on else "none" if prints else "given"
    return Trust(given=given(args, CODE), runs=runs, typed=typed)


def _prog(command: str) -> str:
    return command if command in SCRIPTS else f"nemorl {command}"


def _config_of(command: str) -> type[Any]:
    return SCRIPTS.get(command) or (ALGORITHMS.get(command) or COMMANDS[command]).config


def _extra(cls: type) -> list[Setting]:
    from tyro.conf import UseAppendAction

    presets = "\n".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
    return [
        (
            "config",
            UseAppendAction[tuple[str, ...]],
            "A YAML file with settings; flags win over it, and of several files the later one."
            " --print-config writes one.",
            (),
        ),
        *[
            (
                "preset",
                cast(Any, Literal)[tuple(PRESETS)] | None,
                f"A named set of settings, below --config and flags.\n{presets}",
                None,
            )
        ]
        * issubclass(cls, GRPOConfig),
        (
            "print_config",
            bool,
            "Print the resolved settings as YAML, with comments, and stop. Names of rewards,"
            " backends and loggers and the first rows of data files are checked, the model is not.",
            False,
        ),
        (
            "trust_code",
            bool,
            "Run code that a file of settings, or of a run, names (functions, code of the model),"
            " though no flag names it.",
            False,
        ),
    ]


def _require_inputs(command: str, config: object) -> None:
    """Refuse what is missing or in the way, without torch."""
    from nemorl.models.hub import model_folder

    if isinstance(config, BaseConfig):
        RunDirectory.check_missing(config.run)
    if isinstance(config, BaseConfig | LoadedConfig):
        require(
            bool(config.model.path),
            "model.path",
            "must be given",
            "",
            "add --model.path with a folder or a name on the hub",
        )
    if isinstance(config, EvalConfig):
        require(
            config.data.validation is not None,
            "data.validation",
            "must be given",
            None,
            "add --data.validation FILE",
        )
    model_folder(getattr(getattr(config, "model", None), "path", ""))
    _require_names_and_rows(config)
    if command in ALGORITHMS and isinstance(config, BaseConfig):
        require_rows(config.data.train)
        if config.run.dir and not config.run.resume and torchrun_size() is None:
            RunDirectory(Path(config.run.dir)).require_no_results()
    elif isinstance(config, ExportConfig):
        RunDirectory.open(config.run).require_checkpoint()


def _require_names_and_rows(config: object, *, elsewhere: bool = False) -> None:
    """Refuse wrong names and first rows; only warn of files `elsewhere`."""
    require_names(config)
    data = getattr(config, "data", DataConfig())
    for name, source in {"data.train": data.train, "data.validation": data.validation}.items():
        try:
            require_files(name, source)
        except ValueError as error:
            if not elsewhere:
                raise
            warn(f"the rows are not checked: {error}")
            continue
        files = [rows for rows in first_rows(source) if rows]
        # As many as there are: one of several sets may have the usual names of columns.
        others = len(sources_of(source)) - len(files)
        rows = load_rows(files + files[:1] * others, **data.reading()) if files else []
        if isinstance(config, RewardConfig):
            for_rows(rows[: getattr(config, "max_rows", None)], prompt_of)


def _help(
    command: str, cls: type, args: Sequence[str], tree: dict[str, Any], usual: Collection[str]
) -> str:
    """Return what --help prints; nothing without it."""
    asked = [i for i, argument in enumerate(args) if argument in ("-h", "--help")]
    if not asked:
        return ""
    topic = next((each for each in args[asked[0] + 1 :][:1] if each[0] != "-"), "")
    found = Counter(command if "." not in key else key.partition(".")[0] for key in leaves(cls))
    sections, hidden = dict(found) if len(found) > 1 else {}, unused(cls)
    if topic not in ("", "all", *sections):
        listed = f"; sections: {', '.join(sections)}, all" if sections else ""
        raise ValueError(f"--help has no section {topic!r}{closest(topic, sections)}{listed}")

    def visible(key: str) -> bool:
        section, dot, _ = key.partition(".")
        if key in hidden:
            return False
        own = not dot and not key.startswith("--")
        if topic == "":
            rare = own and key in RARE and issubclass(cls, BaseConfig)
            return key in usual or not (dot or rare)
        return topic == "all" or (own if topic == command else section == topic)

    counted = ", ".join(f"{name} ({count})" for name, count in sections.items())
    more = (
        f"More settings: {_prog(command)} --help SECTION, of {counted}, or all. The last part of a"
        " name is enough where it is unique: --lr for --optimizer.lr."
    )
    return help_of(
        cls,
        tree,
        visible,
        prog=_prog(command),
        extra=_extra(cls) if visible("--config") else [],
        more=more if sections else "",
        brief=topic == "" and bool(sections),
    )


def _config_of_resumed_run(command: str, args: Sequence[str]) -> list[str]:
    directory = RunDirectory(Path(*peek(args, "--run.dir")[-1:]))
    asked = peek(args, "--run.resume")[-1:] in (["true"], ["auto"])
    if not asked or not directory.config.exists():
        return []
    own = SCRIPTS.get(command)
    check_algorithm(directory, *([script_with(own), algorithm_of(own)] if own else [command]))
    return [str(directory.config)]


def _refuse_other_variants(cls: type, section: str, chosen: str, args: Sequence[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in args):
        key = flag.removeprefix(f"--{section}.").removeprefix("no-").replace("-", "_")
        owners = [name for name, member in unions(cls)[section].items() if key in leaves(member)]
        if flag.startswith(f"--{section}.") and owners and chosen not in owners:
            raise ValueError(
                f"{flag} is not a setting of {section} {chosen}: it belongs to {', '.join(owners)};"
                f" add --{section} {owners[0]}"
            )


def _commands(names: Sequence[str] = ()) -> str:
    names, lines = names or [*ALGORITHMS, *COMMANDS], []
    for name in names:
        first, *_ = re.split(r"[.:](?=\s|$)", _config_of(name).__doc__ or "")
        lines.append(f"  {name:<{max(map(len, names))}}  {' '.join(first.split())}")
    return "\n".join(lines)


def _fail(prog: str, message: str, code: int) -> int:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    error = "\x1b[1;31merror:\x1b[0m " if colour else "error: "
    print(f"{prog}: {error * (code <= 2)}{message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
