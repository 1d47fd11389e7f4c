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
    from nemorl.parallel.config import ProfileConfig as ProfileConfig
    from nemorl.parallel.plan import ParallelPlan as ParallelPlan
    from nemorl.rollout.generation import Completion as Completion
    from nemorl.rollout.generation import GenerationBackend as GenerationBackend
    from nemorl.rollout.generation import SamplingParams as SamplingParams
    from nemorl.runtime.api import DPOTrainer as DPOTrainer
    from nemorl.runtime.api import GRPOTrainer as GRPOTrainer
    from nemorl.runtime.api import SFTTrainer as SFTTrainer
    from nemorl.runtime.api import train as train
    from nemorl.runtime.callbacks import Callback as Callback
    from nemorl.runtime.callbacks import StopTraining as StopTraining
    from nemorl.runtime.cli import main as main
    from nemorl.runtime.cluster import Bundle as Bundle
    from nemorl.runtime.cluster import RayVirtualCluster as RayVirtualCluster
    from nemorl.runtime.commands import EvalConfig as EvalConfig
    from nemorl.runtime.commands import ExportConfig as ExportConfig
    from nemorl.runtime.commands import GenerateConfig as GenerateConfig
    from nemorl.runtime.config import BaseConfig as BaseConfig
    from nemorl.runtime.config import DataConfig as DataConfig
    from nemorl.runtime.config import GRPOConfig as GRPOConfig
    from nemorl.runtime.config import LoRAConfig as LoRAConfig
    from nemorl.runtime.config import ModelConfig as ModelConfig
    from nemorl.runtime.config import OptimizerConfig as OptimizerConfig
    from nemorl.runtime.config import RunConfig as RunConfig
    from nemorl.runtime.config import SFTConfig as SFTConfig
    from nemorl.runtime.config import TrainerConfig as TrainerConfig
    from nemorl.runtime.config_io import load_config as load_config
    from nemorl.runtime.generation_config import GenerationConfig as GenerationConfig
    from nemorl.runtime.inference import evaluate as evaluate
    from nemorl.runtime.inference import export as export
    from nemorl.runtime.inference import generate as generate
    from nemorl.runtime.job import Inputs as Inputs
    from nemorl.runtime.job import Job as Job
    from nemorl.runtime.launch import run as run
    from nemorl.runtime.policy_config import CISPOLoss as CISPOLoss
    from nemorl.runtime.policy_config import ClippedLoss as ClippedLoss
    from nemorl.runtime.policy_config import GapConfig as GapConfig
    from nemorl.runtime.policy_config import GroupAdvantage as GroupAdvantage
    from nemorl.runtime.policy_config import GSPOLoss as GSPOLoss
    from nemorl.runtime.policy_config import KLConfig as KLConfig
    from nemorl.runtime.policy_config import OffPolicyConfig as OffPolicyConfig
    from nemorl.runtime.policy_config import OverlongConfig as OverlongConfig
    from nemorl.runtime.policy_config import ReinforceLoss as ReinforceLoss
    from nemorl.runtime.policy_config import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from nemorl.runtime.preference_config import DPOConfig as DPOConfig
    from nemorl.runtime.preference_config import DPOLoss as DPOLoss
    from nemorl.runtime.preference_config import HingeLoss as HingeLoss
    from nemorl.runtime.preference_config import IPOLoss as IPOLoss
    from nemorl.runtime.preference_config import KTOLoss as KTOLoss
    from nemorl.runtime.preference_config import ORPOLoss as ORPOLoss
    from nemorl.runtime.preference_config import SimPOLoss as SimPOLoss
    from nemorl.runtime.presets import preset as preset
    from nemorl.runtime.registry import get_algorithm as get_algorithm
    from nemorl.runtime.registry import get_generation_backend as get_generation_backend
    from nemorl.runtime.registry import get_training_backend as get_training_backend
    from nemorl.runtime.registry import register_algorithm as register_algorithm
    from nemorl.runtime.registry import register_generation_backend as register_generation_backend
    from nemorl.runtime.registry import register_logger as register_logger
    from nemorl.runtime.registry import register_training_backend as register_training_backend
    from nemorl.runtime.report.page import write_report as write_report
    from nemorl.runtime.result import TrainResult as TrainResult
    from nemorl.runtime.runtime_config import RuntimeConfig as RuntimeConfig
    from nemorl.runtime.state import Run as Run
    from nemorl.runtime.weight_sync import sync_weights as sync_weights
    from nemorl.runtime.workers import RayWorkerGroup as RayWorkerGroup

    __version__: str

_NAMES = {
    "nemorl.data.batch": ["TokenBatch"],
    "nemorl.parallel.backend": ["TrainingBackend"],
    "nemorl.parallel.config": ["ProfileConfig"],
    "nemorl.parallel.plan": ["ParallelPlan"],
    "nemorl.rollout.generation": ["Completion", "GenerationBackend", "SamplingParams"],
    "nemorl.runtime.api": ["DPOTrainer", "GRPOTrainer", "SFTTrainer", "train"],
    "nemorl.runtime.callbacks": ["Callback", "StopTraining"],
    "nemorl.runtime.cli": ["main"],
    "nemorl.runtime.cluster": ["Bundle", "RayVirtualCluster"],
    "nemorl.runtime.commands": ["EvalConfig", "ExportConfig", "GenerateConfig"],
    "nemorl.runtime.config": [
        "BaseConfig",
        "DataConfig",
        "GRPOConfig",
        "LoRAConfig",
        "ModelConfig",
        "OptimizerConfig",
        "RunConfig",
        "SFTConfig",
        "TrainerConfig",
    ],
    "nemorl.runtime.config_io": ["load_config"],
    "nemorl.runtime.generation_config": ["GenerationConfig"],
    "nemorl.runtime.inference": ["evaluate", "export", "generate"],
    "nemorl.runtime.job": ["Inputs", "Job"],
    "nemorl.runtime.launch": ["run"],
    "nemorl.runtime.policy_config": [
        "CISPOLoss",
        "ClippedLoss",
        "GapConfig",
        "GroupAdvantage",
        "GSPOLoss",
        "KLConfig",
        "OffPolicyConfig",
        "OverlongConfig",
        "ReinforceLoss",
        "ReinforcePlusPlusAdvantage",
    ],
    "nemorl.runtime.preference_config": ["DPOConfig", "DPOLoss", "HingeLoss", "IPOLoss", "KTOLoss", "ORPOLoss", "SimPOLoss"],
    "nemorl.runtime.presets": ["preset"],
    "nemorl.runtime.registry": [
        "get_algorithm",
        "get_generation_backend",
        "get_training_backend",
        "register_algorithm",
        "register_generation_backend",
        "register_logger",
        "register_training_backend",
    ],
    "nemorl.runtime.result": ["TrainResult"],
    "nemorl.runtime.runtime_config": ["RuntimeConfig"],
    "nemorl.runtime.state": ["Run"],
    "nemorl.runtime.weight_sync": ["sync_weights"],
    "nemorl.runtime.workers": ["RayWorkerGroup"],
    "nemorl.runtime.report.page": ["write_report"],
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
