"""The files of examples/cluster/."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import yaml

from nemorl.runtime.cli.main import main
from tests.examples import write_example_files
from tests.forked import succeeded
from tests.runtime.runs import lines

CLUSTER = Path(__file__).parent.parent / "examples" / "cluster"
SLURM, TORCHRUN, KUBERAY = CLUSTER / "slurm.sh", CLUSTER / "torchrun.sh", CLUSTER / "kuberay.yaml"
STUBS = {
    "scontrol": '[ "$1 $2" = "show hostnames" ] && tr , "\\n" <<< "$3"',
    # The command once per node, in a process group of its own; what ends srun ends all of them.
    "srun": (
        """
nodes=0
while [[ $1 == --* ]]; do
    case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks-per-node=1 | --cpus-per-task=2 | --overlap | --export=ALL | --nodelist=node[12]) ;;
    *) echo "srun: unknown option $1" >&2 && exit 2 ;;
    esac
    shift
done
for ((i = 0; i < nodes; i++)); do setsid --wait "$@" & done
trap 'kill $(jobs -p)' TERM
wait
wait"""
    ),
    # What stands for nemorl takes one CPU of each node, and "saves" when it is told to end.
    "nemorl": (
        """
exec python -u - "$@" << 'PYTHON'
import signal, sys, time, ray
from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster
def save(*_):
    print("saved", *sys.argv[1:])
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
with RayVirtualCluster({"first": [Bundle()], "second": [Bundle()]}, strategy="STRICT_SPREAD"):
    print("attached to", len(ray.nodes()), "nodes")
    time.sleep(60)
PYTHON"""
    ),
}
JOB = "4711"


@pytest.fixture
def slurm(tmp_path: Path):
    """The environment of a Slurm job on two nodes, which are both this machine."""
    (tmp_path / "bin").mkdir()
    for name, code in STUBS.items():
        (tmp_path / "bin" / name).write_text("#!/usr/bin/env bash\n" + code)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "activate").write_text(
        f'PATH="{tmp_path}/bin:{Path(sys.executable).parent}:$PATH"\n'
    )
    job = {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "node1,node2",
        "SLURM_CPUS_ON_NODE": "2",
        "NEMORL_VENV": str(tmp_path),
    }
    yield {**{key: value for key, value in os.environ.items() if not key.startswith("RAY_")}, **job}
    shutil.rmtree(f"/tmp/ray-{JOB}", ignore_errors=True)


def of_this_job() -> list[str]:
    """The processes of the job's Ray cluster, which all name its folder or its port."""
    lines = (
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
    return [line for line in lines if f"/tmp/ray-{JOB}" in line]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_slurm_script_starts_and_ends_a_cluster(slurm: dict[str, str]):
    with subprocess.Popen(
        ["bash", SLURM, "grpo"],
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as script:
        lines = []
        for line in script.stdout:
            lines.append(line)
            if line == "attached to 2 nodes\n":
                assert of_this_job()
                script.send_signal(signal.SIGTERM)  # as Slurm does before the time is up
    assert script.returncode == 143, "".join(lines)
    assert "saved grpo --run.resume=auto\n" in lines
    assert not of_this_job()


@pytest.mark.slow
def test_the_torchrun_script_trains_one_model_on_two_nodes(
    slurm: dict[str, str], forked: Path, tmp_path: Path
):
    """Its name is given once, and the second time the run goes on."""
    (tmp_path / "bin" / "nemorl").unlink()
    (tmp_path / "bin" / "torchrun").write_text(
        f'#!/usr/bin/env bash\nexec "{forked}/python" -m torch.distributed.run "$@"'
    )
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    write_example_files(tmp_path)
    settings = shlex.split(
        "sft --model.path model --data.train demonstrations.jsonl --run.dir run"
        " --trainer.device cpu --run.display none --run.no-plots"
    )
    environment = {
        **slurm,
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": str(forked / "python"),
        "PYTHONPATH": str(CLUSTER.parent.parent),
    }
    command = ["bash", str(TORCHRUN), *settings]
    for steps in (1, 2):
        limit = ["--max-num-steps", str(steps)]
        succeeded(*command, *limit, cwd=tmp_path, timeout=300, **environment)
    found = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2]
    state = tmp_path / "run" / "checkpoints" / "step_2" / "state.json"
    assert json.loads(state.read_text())["cursors"] == {"train": 64}


@pytest.mark.parametrize("script", [SLURM, TORCHRUN], ids=lambda path: path.name)
def test_the_slurm_scripts_are_bash(script: Path):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    settings, commands = text.split("set -euo pipefail\n")
    options = re.findall(r"^#SBATCH (.*)$", settings, re.MULTILINE)
    assert options and all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in options)
    assert "#SBATCH" not in commands  # Slurm reads none after the first command


def test_kuberays_job_has_this_ray_and_what_its_pods_need():
    job = yaml.safe_load(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            resources = container["resources"]
            # Kubernetes wants it so for GPUs, Ray for the rest.
            assert resources["limits"] == resources["requests"]
    assert cluster["rayVersion"] == version("ray")


@pytest.mark.parametrize(
    ("file", "recipe", "section", "expected"),
    [
        (TORCHRUN, "sft", "parallel", {"tp": 8}),
        (SLURM, "grpo", "generation", {"backend": "vllm", "num_replicas": 2}),
        (KUBERAY, "grpo", "generation", {"backend": "vllm", "num_replicas": 2}),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_nemorl_takes_the_settings(
    file: Path, recipe: str, section: str, expected: dict, tmp_path: Path, monkeypatch, capsys
):
    """The command of each example, with a configuration that there is."""
    text = file.read_text()
    if file == KUBERAY:
        command = yaml.safe_load(text)["spec"]["entrypoint"].partition("nemorl ")[2]
    else:
        line = next(line for line in text.splitlines() if "sbatch" in line)
        command = line.partition(f"{file.name} ")[2]
    config = CLUSTER.parent.parent / "configs" / f"{recipe}.yaml"
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(re.sub(r"--config \S+", f"--config {config}", command))
    assert main([*arguments, "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)[section]
    assert expected.items() <= shown.items()
