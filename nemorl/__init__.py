"""nemorl: reinforcement learning and fine-tuning of language models.

>>> import nemorl
>>> nemorl.GRPOConfig(max_num_steps=20).max_num_steps
20

Everything is imported when it is first used: `import nemorl` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl import data as data
    from nemorl import losses as losses
    from nemorl.data.batch import TokenBatch as TokenBatch
    from nemorl.parallel.backend import TrainingBackend as TrainingBackend
    from nemorl.rollout.generation import Completion as Completion
    from nemorl.rollout.generation import GenerationBackend as GenerationBackend
    from nemorl.rollout.generation import SamplingParams as SamplingParams
    from nemorl.runtime.backends import get_generation_backend as get_generation_backend
    from nemorl.runtime.backends import get_training_backend as get_training_backend
    from nemorl.runtime.callbacks import Callback as Callback
    from nemorl.runtime.callbacks import StopTraining as StopTraining
    from nemorl.runtime.commands import EvalConfig as EvalConfig
    from nemorl.runtime.commands import ExportConfig as ExportConfig
    from nemorl.runtime.commands import GenerateConfig as GenerateConfig
    from nemorl.runtime.config import DataConfig as DataConfig
    from nemorl.runtime.config import GenerationConfig as GenerationConfig
    from nemorl.runtime.config import GRPOConfig as GRPOConfig
    from nemorl.runtime.config import ModelConfig as ModelConfig
    from nemorl.runtime.config import OptimizerConfig as OptimizerConfig
    from nemorl.runtime.config import RunConfig as RunConfig
    from nemorl.runtime.config import SFTConfig as SFTConfig
    from nemorl.runtime.config import TrainerConfig as TrainerConfig
    from nemorl.runtime.config_io import load_config as load_config
    from nemorl.runtime.launch import RunResult as RunResult
    from nemorl.runtime.launch import evaluate as evaluate
    from nemorl.runtime.launch import export as export
    from nemorl.runtime.launch import generate as generate
    from nemorl.runtime.launch import run as run
    from nemorl.runtime.policy_config import CISPOLoss as CISPOLoss
    from nemorl.runtime.policy_config import ClippedLoss as ClippedLoss
    from nemorl.runtime.policy_config import GroupAdvantage as GroupAdvantage
    from nemorl.runtime.policy_config import GSPOLoss as GSPOLoss
    from nemorl.runtime.policy_config import KLConfig as KLConfig
    from nemorl.runtime.policy_config import OffPolicyConfig as OffPolicyConfig
    from nemorl.runtime.policy_config import OverlongConfig as OverlongConfig
    from nemorl.runtime.policy_config import ReinforceLoss as ReinforceLoss
    from nemorl.runtime.policy_config import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from nemorl.runtime.presets import preset as preset

    __version__: str

_NAMES = {
    "nemorl.data.batch": ["TokenBatch"],
    "nemorl.parallel.backend": ["TrainingBackend"],
    "nemorl.rollout.generation": ["Completion", "GenerationBackend", "SamplingParams"],
    "nemorl.runtime.backends": ["get_generation_backend", "get_training_backend"],
    "nemorl.runtime.callbacks": ["Callback", "StopTraining"],
    "nemorl.runtime.commands": ["EvalConfig", "ExportConfig", "GenerateConfig"],
    "nemorl.runtime.config": [
        "DataConfig",
        "GenerationConfig",
        "GRPOConfig",
        "ModelConfig",
        "OptimizerConfig",
        "RunConfig",
        "SFTConfig",
        "TrainerConfig",
    ],
    "nemorl.runtime.config_io": ["load_config"],
    "nemorl.runtime.launch": ["RunResult", "evaluate", "export", "generate", "run"],
    "nemorl.runtime.policy_config": [
        "CISPOLoss",
        "ClippedLoss",
        "GroupAdvantage",
        "GSPOLoss",
        "KLConfig",
        "OffPolicyConfig",
        "OverlongConfig",
        "ReinforceLoss",
        "ReinforcePlusPlusAdvantage",
    ],
    "nemorl.runtime.presets": ["preset"],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_SUBPACKAGES = ("data", "losses")

__all__ = ["__version__", *_SUBPACKAGES, *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("nemorl")
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name in _SUBPACKAGES:
        value = import_module(f"nemorl.{name}")
    else:
        raise AttributeError(f"module 'nemorl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
