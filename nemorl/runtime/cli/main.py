"""The command line: an algorithm by its name (`nemorl grpo`), and the commands of `COMMANDS`.

Settings come in layers: defaults < preset < --config file.yaml < flags. Nothing here imports torch
before the settings are known to be good.
"""

import contextlib
import dataclasses
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from nemorl.checks import closest, require
from nemorl.parallel.planner.config import PlanConfig
from nemorl.runtime.cli.commands import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    ReportConfig,
    print_evaluation,
    print_generations,
    write_answers,
)
from nemorl.runtime.config.base import BaseConfig, GRPOConfig
from nemorl.runtime.config.tree import construct, dump_yaml, layer, unions, yaml_layer
from nemorl.runtime.ranks.following import FollowedRunFailed, follows, wait_for_rank_zero
from nemorl.runtime.run.directory import RunDirectory, free_directory
from nemorl.runtime.run.signals import Terminated
from nemorl.runtime.start.registry import ALGORITHMS

HELP = """\
nemorl: reinforcement learning and fine-tuning of language models

usage: nemorl [--import MODULE] COMMAND [OPTIONS]

commands
{commands}

start here
  nemorl sft  --model.path Qwen/Qwen3-0.6B --data.train demos.jsonl --run.dir runs/sft
  nemorl grpo --model.path runs/sft/hf --data.train problems.jsonl --reward exact_match --run.dir runs/rl
  nemorl dpo  --model.path runs/sft/hf --data.train pairs.jsonl --run.dir runs/dpo
  nemorl grpo --preset dapo --config my.yaml --optimizer.lr 1e-6      flags win over the file, the file over the preset
  nemorl grpo --preset dapo --print-config > my.yaml                  write a file to start from
  nemorl grpo --run.dir runs/rl --run.resume                          go on with a run that was interrupted, by its own settings
  nemorl grpo --config my.yaml --parallel.dp-shard 4                  one model on four devices of this machine
  nemorl plan --model Qwen/Qwen3-32B --gpus 16 --gpu-memory 80        which ways to spread a model fit, and how fast they would be
  nemorl eval --model runs/rl --data test.jsonl --output answers.jsonl
  nemorl generate --model runs/rl --prompt "12+34=" -n 4 --temperature 0.7
  nemorl report runs/rl                                               curves, samples and settings as one web page

A row of data is one JSON object a line: {{"prompt": "12+34=", "answer": "46"}} (grpo, eval), {{"prompt": "12+34=", "response": "46"}} (sft),
{{"prompt": "12+34=", "chosen": "46", "rejected": "47"}} (dpo); nemorl data inspect shows what becomes of it.
--import my_module makes what a file of yours registers known by name: algorithms as commands, backends, loggers.
nemorl COMMAND --help lists every setting. NEMORL_TRACEBACK=1 shows where an error came from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 a setting or input that can't be,
    130 interrupted, 143 terminated.

    Of several processes that torchrun has started, the one of rank 0 alone says anything.
    """
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "1000"
    )  # before torch is there: spinning OpenMP threads stall each other on a busy machine
    if not follows():
        return _main(argv)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    command, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    while command == "--import":
        module, command, *args = [*args, *["--help"] * (2 - len(args))]
        if (problem := _import(module)) is not None:
            return _fail("nemorl", problem, 2)
    if args and f"{command} {args[0]}" in COMMANDS:
        command = f"{command} {args.pop(0)}"
    if command in ("-h", "--help", "help"):
        print(HELP.format(commands=_commands()), end="")
        return 0
    if command in ("-V", "--version"):
        from importlib.metadata import version

        print(f"nemorl {version('nemorl')}")
        return 0
    known = [*ALGORITHMS, *COMMANDS]
    if command not in known:
        return _fail(
            "nemorl",
            f"unknown command {command!r}{closest(command, known) or '.'} Commands:"
            f" {', '.join(known)}",
            2,
        )
    config: Any = None
    claimed: str | None = None
    shown, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        with contextlib.redirect_stderr(sys.stdout) if follows() else contextlib.nullcontext():
            config = parse(command, args)
        if follows() and command in COMMANDS:
            return 0  # rank 0 does it
        if isinstance(config, BaseConfig) and config.run.dir is None and not follows():
            claimed = free_directory(command)
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=claimed))
        if config is not None:
            (_train if command in ALGORITHMS else COMMANDS[command].execute)(config)
        return 0
    except Terminated as stop:
        return _fail(
            f"nemorl {command}", _interrupted(command, config, "terminated"), int(str(stop.code))
        )
    except (
        SystemExit
    ) as stop:  # --help, flags that tyro has refused, and rank 0 where this process follows it
        if follows() and stop.code and not isinstance(stop, FollowedRunFailed):
            wait_for_rank_zero()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _fail(f"nemorl {command}", _interrupted(command, config), 130)
    except BrokenPipeError:  # nemorl … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("NEMORL_TRACEBACK") or not (
            isinstance(error, ValueError | OSError | FloatingPointError) or of_a_reward(error)
        ):
            raise
        if of_a_reward(error):
            print(*traceback.format_list(_outside(error)), sep="", end="", file=sys.stderr)
        hint = "" if config is None else " (NEMORL_TRACEBACK=1 shows where this came from)"
        told = (
            note for note in getattr(error, "__notes__", ()) if not note.startswith("in worker ")
        )  # that is a worker's traceback
        notes = "".join(f"\n{note}" for note in told)
        kind = f"{type(error).__name__}: " if of_a_reward(error) else ""
        return _fail(
            f"nemorl {command}",
            f"{kind}{error}{notes}{hint}",
            2 if isinstance(error, ValueError) else 1,
        )
    finally:
        warnings.formatwarning = shown
        if claimed is not None:
            with contextlib.suppress(OSError):  # there is something in it: the run began
                Path(claimed).rmdir()


def parse(command: str, args: Sequence[str]) -> Any:
    """The config of a command from all layers, checked; None where --print-config has printed it."""
    from nemorl.runtime.config.flags import Extra, parse_flags, peek
    from nemorl.runtime.config.presets import DESCRIPTIONS, PRESETS, preset_overrides

    cls = ALGORITHMS[command].config if command in ALGORITHMS else COMMANDS[command].config
    extra: list[Extra] = [
        (
            "config",
            str | None,
            None,
            (
                "A YAML file with settings; flags win over it. --print-config writes one to start"
                " from."
            ),
        )
    ]
    tree: dict[str, Any] = {}
    if cls is GRPOConfig:
        listed = "\n".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
        extra.append(
            (
                "preset",
                cast(Any, Literal)[tuple(PRESETS)] | None,
                None,
                f"A named set of settings, below --config and flags.\n{listed}",
            )
        )
        if (name := peek(args, "--preset")) not in (None, "None"):
            tree = preset_overrides(name)
    extra.append(("print_config", bool, False, "Print the resolved settings as YAML and stop."))
    tree = layer(cls, {}, tree)
    if (path := peek(args, "--config") or _config_of_resumed_run(command, args)) not in (
        None,
        "None",
    ):
        tree = yaml_layer(cls, tree, path)
    for section, members in unions(cls).items():
        if (chosen := peek(args, f"--{section}")) is not None:
            tree = layer(cls, tree, {section: {"name": chosen}})
        _refuse_other_variants(section, members, tree[section]["name"], args)
    tree, given = parse_flags(cls, tree, args, prog=f"nemorl {command}", extra=extra)
    config = construct(cls, tree)
    if given["print_config"]:
        print(dump_yaml(config), end="")
        return None
    if isinstance(config, BaseConfig):
        missing = config.run.resume and path is None and not config.model.path
        require(
            not missing,
            "run.dir",
            "must be that of a run to resume",
            config.run.dir,
            "there is none in it: check the path",
        )
        for key, value, what in (
            ("model.path", config.model.path, "folder"),
            ("data.train", config.data.train, "file"),
        ):
            require(
                bool(value),
                key,
                "must be given",
                value,
                f"add --{key} with a {what} or a name on the hub",
            )
    return config


def _config_of_resumed_run(command: str, args: Sequence[str]) -> str | None:
    """A run that is resumed without --config brings its own:

    `nemorl grpo --run.dir runs/rl --run.resume`. ValueError if it is another one's.
    """
    from nemorl.runtime.config.flags import peek
    from nemorl.runtime.run.record import read_record

    directory = RunDirectory(Path(peek(args, "--run.dir") or ""))
    if "--run.resume" not in args or not directory.config.exists():
        return None
    record = read_record(directory)
    algorithm = command if record is None else record.algorithm
    remedy = f"nemorl {algorithm} --run.dir {directory.path} --run.resume goes on with it"
    require(
        algorithm == command,
        "run.dir",
        f"must be that of a run of {command}",
        f"one of {algorithm}",
        remedy,
    )
    return str(directory.config)


def _refuse_other_variants(
    section: str, members: dict[str, type[Any]], chosen: str, args: Sequence[str]
) -> None:
    """An error that explains, for a flag of a variant that was not chosen: --loss reinforce
    --loss.clip-low 0.1.
    """
    keys = {
        name: [field.name for field in dataclasses.fields(member) if field.name != "name"]
        for name, member in members.items()
    }
    for argument in args:
        flag = argument.partition("=")[0]
        key = flag.removeprefix(f"--{section}.").removeprefix("no-").replace("-", "_")
        owners = [name for name in keys if key in keys[name]]
        if flag.startswith(f"--{section}.") and owners and chosen not in owners:
            own = ", ".join(keys[chosen]) or "it has none"
            raise ValueError(
                f"{flag} is no setting of {section} {chosen} ({own}): it belongs to"
                f" {', '.join(owners)}; add --{section} {owners[0]}"
            )


def _train(config: BaseConfig) -> None:
    from nemorl.runtime.start import launch

    launch.run(config)


def _evaluate(config: EvalConfig) -> None:
    from nemorl.runtime.cli import inference

    result = inference.evaluate(config)
    if config.output is not None:
        write_answers(config.output, result["answers"])
    print_evaluation(config, result)
    if config.output is not None:
        print(f"answers written to {config.output}")


def _generate(config: GenerateConfig) -> None:
    from nemorl.runtime.cli import inference

    print_generations(config, inference.generate(config))


def _export(config: ExportConfig) -> None:
    from nemorl.runtime.cli import inference

    path = inference.export(config)
    print(f'exported to {path}; try it: nemorl generate --model {path} --prompt "…"')


def _inspect(config: InspectConfig) -> None:
    from nemorl.runtime.cli.inspect import inspect_data, print_inspection

    print_inspection(config, inspect_data(config))


def _report(config: ReportConfig) -> None:
    from nemorl.runtime.watch.report.page import write_report

    print(f"written to {write_report(config.run, config.output)}; open it in a browser")


def _plan(config: PlanConfig) -> None:
    from nemorl.parallel.planner.command import find_plans, print_plans

    print_plans(config, find_plans(config))


class Command(NamedTuple):
    """A command besides the algorithms: what it is asked for, and what it does."""

    config: type[Any]
    execute: Callable[[Any], None]


COMMANDS = {
    "eval": Command(EvalConfig, _evaluate),
    "generate": Command(GenerateConfig, _generate),
    "export": Command(ExportConfig, _export),
    "report": Command(ReportConfig, _report),
    "data inspect": Command(InspectConfig, _inspect),
    "plan": Command(PlanConfig, _plan),
}


def of_a_reward(error: BaseException) -> bool:
    """Whether it was raised by a reward function of the user's, so that our own frames say nothing."""
    return any(note.startswith("This was reward ") for note in getattr(error, "__notes__", ()))


def _outside(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are not ours."""
    own = str(Path(__file__).parents[2])
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(own)
    ]


def _warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as someone at a terminal reads it."""
    return f"warning: {message}\n"


def _import(module: str) -> str | None:
    """Import a module of the working directory or an installed one; returns what is wrong with it."""
    sys.path.insert(0, str(Path.cwd()))  # an installed command does not look where it is run
    try:
        import_module(module.removesuffix(".py"))
    except ImportError as error:
        return (
            f"--import must name a module in {Path.cwd()} or an installed one, but {module!r} can't"
            f" be imported ({error}): check its name"
        )
    return None


def _commands() -> str:
    """A line for each command: the first of its config's docstring."""
    configs = {name: algorithm.config for name, algorithm in ALGORITHMS.items()} | {
        name: command.config for name, command in COMMANDS.items()
    }
    width = max(map(len, configs))
    return "\n".join(
        f"  {name:<{width}}  {(inspect.getdoc(config) or '').splitlines()[0]}"
        for name, config in configs.items()
    )


def _interrupted(command: str, config: Any, how: str = "interrupted") -> str:
    if not isinstance(config, BaseConfig):
        return how
    if not (Path(str(config.run.dir)) / "checkpoints" / "latest").exists():
        return f"{how} before there was anything to save in {config.run.dir}"
    return (
        f"{how}; go on from the last checkpoint with: nemorl {command} --run.dir {config.run.dir}"
        " --run.resume"
    )


def _fail(prog: str, message: str, code: int) -> int:
    if follows():
        wait_for_rank_zero()
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    error = "\x1b[1;31merror:\x1b[0m" if colour else "error:"
    print(f"{prog}: {message}" if code > 2 else f"{prog}: {error} {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
