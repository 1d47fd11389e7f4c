"""Uses nemorl on one device without any extra: `python -m tests.base_install FOLDER`."""

import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

EXTRAS = (
    *("torchtitan", "spmd_types", "megatron", "ray", "vllm", "peft", "math_verify", "openai"),
    *("tensorboard", "wandb"),
)


class WithoutExtras(PathFinder):
    """Finds modules as Python does, but for the packages of the extras."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            return None
        return super().find_spec(name, path, target)


def main(folder: Path) -> None:
    sys.meta_path[:] = [WithoutExtras if each is PathFinder else each for each in sys.meta_path]
    for name in [*sys.modules]:  # where a forked program has them from its server
        if name.partition(".")[0] in ("nemorl", *EXTRAS):
            del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from quickstart import save_model, save_tokenizer

    import nemorl

    model, rows = folder / "model", folder / "rows.jsonl"
    save_model(model, save_tokenizer(model), seed=0)
    sums = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a in range(5) for b in range(4)]
    rows.write_text(
        "".join(
            json.dumps({"prompt": p, "answer": a, "response": a, "chosen": a, "rejected": b}) + "\n"
            for p, a, b in sums
        )
    )

    def run(command: str) -> None:
        code = nemorl.main([part.replace("FOLDER", str(folder)) for part in command.split()])
        assert code == 0, command

    common = "--data.train FOLDER/rows.jsonl --max-num-steps 2 --trainer.device cpu"
    common += " --data.max-total-sequence-length 32 --run.display plain"
    validated = "--data.validation FOLDER/rows.jsonl --generation.max-new-tokens 4"
    sizes = "--num-prompts-per-step 4 --num-generations-per-prompt 2"
    run(f"sft --model.path FOLDER/model --run.dir FOLDER/sft {common} {validated}")
    run(f"grpo --model.path FOLDER/sft --run.dir FOLDER/grpo {common} {validated} {sizes}")
    run(f"dpo --model.path FOLDER/sft --run.dir FOLDER/dpo {common} --loss kto")
    run("sft --run.dir FOLDER/sft --run.resume --max-num-steps 3")
    run("eval --model FOLDER/grpo --validation FOLDER/rows.jsonl --output FOLDER/answers.jsonl")
    run("generate --model FOLDER/dpo --prompt 1+1= --max-new-tokens 4")
    run("export --run FOLDER/grpo --output FOLDER/exported")
    run("report FOLDER/grpo")
    run("data inspect --model.path FOLDER/model --data.train FOLDER/rows.jsonl")
    run("plan --model FOLDER/model --gpus 2 --gpu-memory 80")
    assert (folder / "exported" / "model.safetensors").exists()
    assert (folder / "grpo" / "report.html").stat().st_size > 10_000
    assert len((folder / "answers.jsonl").read_text().splitlines()) == len(sums)
    print("everything works")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
