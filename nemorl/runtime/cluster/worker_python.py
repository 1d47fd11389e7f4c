"""The interpreters of workers: one that is named, or an environment that is built from one of
nemorl's extras and kept.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import metadata, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nemorl.checks import require

EXTRA = "extra:"
_DONE = ".complete"

_PROBE = """
import importlib.metadata, importlib.util, json, sys
providers = importlib.metadata.packages_distributions()
found = {name: importlib.metadata.version(providers[name][0]) if name in providers else None for name in sys.argv[1:]}
print(json.dumps({"python": list(sys.version_info[:2]), "nemorl": importlib.util.find_spec("nemorl") is not None, "packages": found}))
"""


def resolve_python(spec: str | None, *, field: str = "python") -> str | None:
    """The interpreter that a setting means: None stays None (the driver's), a path or a command is
    looked up, and "extra:NAME" is an environment with the requirements of nemorl[NAME], built at
    the first use and kept in the cache (NEMORL_CACHE, by default ~/.cache/nemorl).

    Raises ValueError if there is none, or if it can't be built.
    """
    if spec is None:
        return None
    if spec.startswith(EXTRA):
        extra, known = spec.removeprefix(EXTRA), metadata("nemorl").get_all("Provides-Extra") or []
        require(
            extra in known,
            field,
            f"must name one of nemorl's extras ({', '.join(known)})",
            spec,
            "for instance extra:vllm",
        )
        return str(environment(extra, requirements_of(extra)))
    found = shutil.which(Path(spec).expanduser())
    require(
        found is not None,
        field,
        "must be an interpreter",
        spec,
        "give a path such as env/bin/python, or extra:NAME",
    )
    return str(Path(str(found)).absolute())  # not resolved: in a virtual environment it is a link


def check_python(
    python: str, needs: Mapping[str, str | None], *, field: str = "python"
) -> dict[str, str]:
    """The versions of the modules `needs` (name -> range of versions, None for any) in an
    interpreter that workers can run under.

    Raises ValueError with all that is wrong: a minor version of Python or a version of Ray other
    than the driver's, what is missing or out of range.
    """
    needs = {**needs, "ray": f"=={version('ray')}"}
    environment = {**os.environ, **worker_variables()}
    command = [python, "-c", _PROBE, *needs]
    try:
        output = subprocess.run(
            command,
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise ValueError(
            f"{field} must be a Python interpreter, but {python} can't run a line of Python"
            f" ({said}): name another one"
        ) from error
    wrong, missing = [], []
    its, ours = (".".join(map(str, numbers)) for numbers in (found["python"], sys.version_info[:2]))
    if its != ours:
        wrong.append(f"it is Python {its}, where {ours} is needed, the driver's")
    if not found["nemorl"]:
        wrong.append("it doesn't find nemorl")
    for name, wanted in needs.items():
        has = found["packages"][name]
        if has is None or (
            wanted is not None and not SpecifierSet(wanted).contains(has, prereleases=True)
        ):
            wrong.append(
                f"{name} is {has or 'missing'}" + (f", where {wanted} is needed" if wanted else "")
            )
            missing.append(f"'{name}{wanted or ''}'")
    if wrong:
        remedy = (
            f"{python} -m pip install {' '.join(missing)}"
            if missing and len(missing) == len(wrong)
            else "name another one"
        )
        raise ValueError(
            f"{field} must be an interpreter that can run the workers, but {python} can't, since "
            + "; ".join(wrong)
            + f": {remedy}"
        )
    return {name: found["packages"][name] for name in needs}


def worker_variables() -> dict[str, str]:
    """What the environment of a worker under another interpreter needs: a path with nemorl on it,
    and nothing else of the driver's packages.
    """
    package = Path(__file__).parents[2]
    folder = cache() / f"package-{_hash(str(package))}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "nemorl").symlink_to(package, target_is_directory=True)
    return {"PYTHONPATH": str(folder)}


def requirements_of(extra: str) -> list[str]:
    """What nemorl[extra] depends on, on this platform, with Ray as the driver has it.

    >>> [line for line in requirements_of("titan") if line.startswith("torchtitan")]
    ['torchtitan==0.3.0']
    """
    found, extras = [], [extra]
    for name in extras:
        for line in requires("nemorl") or []:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": name}):
                continue
            requirement.marker = None
            if requirement.name == "nemorl":
                extras.extend(sorted(requirement.extras - set(extras)))
            elif requirement.name != "ray":
                found.append(str(requirement))
    return [*dict.fromkeys(found), f"ray=={version('ray')}"]


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter of a virtual environment with these requirements, built unless the cache has
    it. One process builds, others wait.
    """
    folder = cache() / "environments" / f"{name}-{_hash(sys.version, *sorted(requirements))}"
    python = folder / "bin" / "python"
    with _alone(folder.with_suffix(".lock")):
        if (folder / _DONE).exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed while it built
        print(
            f"an environment for {name} is built in {folder}, this once",
            file=sys.stderr,
            flush=True,
        )
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            *requirements,
        ]
        try:
            for command in ([sys.executable, "-m", "venv", str(folder)], install):
                subprocess.run(command, stdout=sys.stderr, check=True)
            (folder / _DONE).touch()
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, subprocess.CalledProcessError | OSError):
                raise ValueError(
                    f"the environment for {name} can't be built, as told above:"
                    f" `{' '.join(install)}` failed"
                ) from error
            raise
    return python


def cache() -> Path:
    """The folder of what is built once and kept."""
    return Path(os.environ.get("NEMORL_CACHE") or Path.home() / ".cache" / "nemorl").absolute()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
