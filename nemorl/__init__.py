"""nemorl: reinforcement learning and fine-tuning of language models.

>>> import nemorl
>>> nemorl.GRPOConfig(max_num_steps=20).max_num_steps
20

Everything is imported when it is first used: `import nemorl` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import nemorl.openmp as _openmp  # noqa: F401  (before torch, which reads what it sets)

if TYPE_CHECKING:
    from nemorl import data as data
    from nemorl import losses as losses
    from nemorl.data.batch import TokenBatch as TokenBatch
    from nemorl.data.sources import DataModule as DataModule
    from nemorl.losses.types import Needs as Needs
    from nemorl.losses.types import needs as needs
    from nemorl.parallel.backend import TrainingBackend as TrainingBackend
    from nemorl.parallel.config import BackendConfig as BackendConfig
    from nemorl.parallel.config import LoRAConfig as LoRAConfig
    from nemorl.parallel.config import ModelConfig as ModelConfig
    from nemorl.parallel.config import OptimizerConfig as OptimizerConfig
    from nemorl.parallel.config import ProfileConfig as ProfileConfig
    from nemorl.parallel.config import TrainerConfig as TrainerConfig
    from nemorl.parallel.plan import ParallelPlan as ParallelPlan
    from nemorl.parallel.proving import prove as prove
    from nemorl.rollout.config import GenerationConfig as GenerationConfig
    from nemorl.rollout.config import RolloutConfig as RolloutConfig
    from nemorl.rollout.conversation import ContextFull as ContextFull
    from nemorl.rollout.conversation import Conversation as Conversation
    from nemorl.rollout.conversation import ConversationFailed as ConversationFailed
    from nemorl.rollout.conversation import Episode as Episode
    from nemorl.rollout.conversation import Failure as Failure
    from nemorl.rollout.conversation import Outcome as Outcome
    from nemorl.rollout.conversation import Policy as Policy
    from nemorl.rollout.conversation import Turn as Turn
    from nemorl.rollout.environment import EnvironmentInterface as EnvironmentInterface
    from nemorl.rollout.environment import EnvironmentReturn as EnvironmentReturn
    from nemorl.rollout.environment import FunctionalRewardWrapper as FunctionalRewardWrapper
    from nemorl.rollout.environments.classes import TurnResult as TurnResult
    from nemorl.rollout.environments.openenv import openenv as openenv
    from nemorl.rollout.generation import Completion as Completion
    from nemorl.rollout.generation import GenerationBackend as GenerationBackend
    from nemorl.rollout.generation import SamplingParams as SamplingParams
    from nemorl.rollout.judge import Judge as Judge
    from nemorl.rollout.judge import RewardServer as RewardServer
    from nemorl.rollout.processes import judged_in_processes as judged_in_processes
    from nemorl.runtime.algorithms.policy_loss import at_version as at_version
    from nemorl.runtime.algorithms.policy_loss import policy_loss as policy_loss
    from nemorl.runtime.cli.api import DPOTrainer as DPOTrainer
    from nemorl.runtime.cli.api import GRPOTrainer as GRPOTrainer
    from nemorl.runtime.cli.api import SFTTrainer as SFTTrainer
    from nemorl.runtime.cli.api import train as train
    from nemorl.runtime.cli.inference import evaluate as evaluate
    from nemorl.runtime.cli.inference import export as export
    from nemorl.runtime.cli.inference import generate as generate
    from nemorl.runtime.cli.main import cli as cli
    from nemorl.runtime.cli.main import main as main
    from nemorl.runtime.config.base import BaseConfig as BaseConfig
    from nemorl.runtime.config.base import DataConfig as DataConfig
    from nemorl.runtime.config.base import RunConfig as RunConfig
    from nemorl.runtime.config.base import RuntimeConfig as RuntimeConfig
    from nemorl.runtime.config.grpo import AsyncConfig as AsyncConfig
    from nemorl.runtime.config.grpo import CISPOLoss as CISPOLoss
    from nemorl.runtime.config.grpo import ClippedLoss as ClippedLoss
    from nemorl.runtime.config.grpo import GapConfig as GapConfig
    from nemorl.runtime.config.grpo import GroupAdvantage as GroupAdvantage
    from nemorl.runtime.config.grpo import GRPOConfig as GRPOConfig
    from nemorl.runtime.config.grpo import GSPOLoss as GSPOLoss
    from nemorl.runtime.config.grpo import KLConfig as KLConfig
    from nemorl.runtime.config.grpo import OffPolicyConfig as OffPolicyConfig
    from nemorl.runtime.config.grpo import OverlongConfig as OverlongConfig
    from nemorl.runtime.config.grpo import ReceiptsConfig as ReceiptsConfig
    from nemorl.runtime.config.grpo import ReinforceLoss as ReinforceLoss
    from nemorl.runtime.config.grpo import ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage
    from nemorl.runtime.config.grpo import preset as preset
    from nemorl.runtime.config.offline import DPOConfig as DPOConfig
    from nemorl.runtime.config.offline import DPOLoss as DPOLoss
    from nemorl.runtime.config.offline import HingeLoss as HingeLoss
    from nemorl.runtime.config.offline import IPOLoss as IPOLoss
    from nemorl.runtime.config.offline import KTOLoss as KTOLoss
    from nemorl.runtime.config.offline import ORPOLoss as ORPOLoss
    from nemorl.runtime.config.offline import SFTConfig as SFTConfig
    from nemorl.runtime.config.offline import SimPOLoss as SimPOLoss
    from nemorl.runtime.config.tree import load_config as load_config
    from nemorl.runtime.engines.weights import sync_weights as sync_weights
    from nemorl.runtime.run.loop import Run as Run
    from nemorl.runtime.run.loop import Step as Step
    from nemorl.runtime.run.open_run import open_run as open_run
    from nemorl.runtime.run.open_run import run as run
    from nemorl.runtime.run.registry import get_algorithm as get_algorithm
    from nemorl.runtime.run.registry import get_generation_backend as get_generation_backend
    from nemorl.runtime.run.registry import get_training_backend as get_training_backend
    from nemorl.runtime.run.registry import register_advantage as register_advantage
    from nemorl.runtime.run.registry import register_algorithm as register_algorithm
    from nemorl.runtime.run.registry import (
        register_generation_backend as register_generation_backend,
    )
    from nemorl.runtime.run.registry import register_logger as register_logger
    from nemorl.runtime.run.registry import register_loss as register_loss
    from nemorl.runtime.run.registry import register_reward as register_reward
    from nemorl.runtime.run.registry import register_training_backend as register_training_backend
    from nemorl.runtime.run.saving import TrainResult as TrainResult
    from nemorl.runtime.store.state import RunView as RunView
    from nemorl.runtime.watch.callbacks import Callback as Callback
    from nemorl.runtime.watch.callbacks import StopTraining as StopTraining
    from nemorl.runtime.watch.loggers import LoggedRun as LoggedRun
    from nemorl.runtime.watch.loggers import MetricLogger as MetricLogger
    from nemorl.runtime.watch.report import write_report as write_report
    from nemorl.runtime.workers.cluster import Bundle as Bundle
    from nemorl.runtime.workers.cluster import RayVirtualCluster as RayVirtualCluster
    from nemorl.runtime.workers.worker import RayWorkerGroup as RayWorkerGroup

    __version__: str

_NAMES = {
    "nemorl.data.batch": ["TokenBatch"],
    "nemorl.data.sources": ["DataModule"],
    "nemorl.rollout.conversation": [
        "ContextFull",
        "Conversation",
        "ConversationFailed",
        "Episode",
        "Failure",
        "Outcome",
        "Policy",
        "Turn",
    ],
    "nemorl.rollout.environment": [
        "EnvironmentInterface",
        "EnvironmentReturn",
        "FunctionalRewardWrapper",
    ],
    "nemorl.rollout.environments.classes": ["TurnResult"],
    "nemorl.rollout.environments.openenv": ["openenv"],
    "nemorl.runtime.watch.loggers": ["LoggedRun", "MetricLogger"],
    "nemorl.losses.types": ["Needs", "needs"],
    "nemorl.parallel.backend": ["TrainingBackend"],
    "nemorl.parallel.config": [
        "BackendConfig",
        "LoRAConfig",
        "ModelConfig",
        "OptimizerConfig",
        "ProfileConfig",
        "TrainerConfig",
    ],
    "nemorl.parallel.plan": ["ParallelPlan"],
    "nemorl.parallel.proving": ["prove"],
    "nemorl.rollout.generation": ["Completion", "GenerationBackend", "SamplingParams"],
    "nemorl.rollout.judge": ["Judge", "RewardServer"],
    "nemorl.rollout.processes": ["judged_in_processes"],
    "nemorl.runtime.cli.api": ["DPOTrainer", "GRPOTrainer", "SFTTrainer", "train"],
    "nemorl.runtime.watch.callbacks": ["Callback", "StopTraining"],
    "nemorl.runtime.algorithms.policy_loss": ["at_version", "policy_loss"],
    "nemorl.runtime.cli.main": ["cli", "main"],
    "nemorl.runtime.workers.cluster": ["Bundle", "RayVirtualCluster"],
    "nemorl.runtime.config.base": ["BaseConfig", "DataConfig", "RunConfig", "RuntimeConfig"],
    "nemorl.runtime.config.tree": ["load_config"],
    "nemorl.rollout.config": ["GenerationConfig", "RolloutConfig"],
    "nemorl.runtime.cli.inference": ["evaluate", "export", "generate"],
    "nemorl.runtime.run.loop": ["Run", "Step"],
    "nemorl.runtime.run.open_run": ["open_run", "run"],
    "nemorl.runtime.config.grpo": [
        "AsyncConfig",
        "ReceiptsConfig",
        "CISPOLoss",
        "ClippedLoss",
        "GRPOConfig",
        "GapConfig",
        "GroupAdvantage",
        "GSPOLoss",
        "KLConfig",
        "OffPolicyConfig",
        "OverlongConfig",
        "ReinforceLoss",
        "ReinforcePlusPlusAdvantage",
        "preset",
    ],
    "nemorl.runtime.config.offline": [
        "DPOConfig",
        "DPOLoss",
        "HingeLoss",
        "IPOLoss",
        "KTOLoss",
        "ORPOLoss",
        "SimPOLoss",
        "SFTConfig",
    ],
    "nemorl.runtime.run.registry": [
        "get_algorithm",
        "get_generation_backend",
        "get_training_backend",
        "register_advantage",
        "register_algorithm",
        "register_generation_backend",
        "register_logger",
        "register_loss",
        "register_reward",
        "register_training_backend",
    ],
    "nemorl.runtime.run.saving": ["TrainResult"],
    "nemorl.runtime.store.state": ["RunView"],
    "nemorl.runtime.engines.weights": ["sync_weights"],
    "nemorl.runtime.workers.worker": ["RayWorkerGroup"],
    "nemorl.runtime.watch.report": ["write_report"],
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
