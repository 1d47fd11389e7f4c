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
    from nemorl import data, losses
    from nemorl.data.batch import TokenBatch
    from nemorl.data.sources import DataModule
    from nemorl.losses.types import Needs, needs
    from nemorl.parallel.backend import TrainingBackend
    from nemorl.parallel.config import (
        BackendConfig,
        LoRAConfig,
        ModelConfig,
        OptimizerConfig,
        OptimSettings,
        ProfileConfig,
        TrainerConfig,
    )
    from nemorl.parallel.plan import ParallelPlan
    from nemorl.parallel.proving import prove
    from nemorl.rollout.config import GenerationConfig, RolloutConfig
    from nemorl.rollout.conversation import (
        ContextFull,
        Conversation,
        ConversationFailed,
        Episode,
        Failure,
        Outcome,
        Policy,
        Turn,
    )
    from nemorl.rollout.environment import (
        EnvironmentInterface,
        EnvironmentReturn,
        FunctionalRewardWrapper,
    )
    from nemorl.rollout.environments.classes import TurnResult
    from nemorl.rollout.environments.openenv import openenv
    from nemorl.rollout.generation import (
        Completion,
        GenerationBackend,
        SamplingParams,
        Scores,
    )
    from nemorl.rollout.judge import Judge, RewardServer
    from nemorl.rollout.processes import judged_in_processes
    from nemorl.runtime.algorithms.policy_loss import at_version, policy_loss
    from nemorl.runtime.cli.api import DPOTrainer, GRPOTrainer, SFTTrainer, train
    from nemorl.runtime.cli.inference import evaluate, export, generate
    from nemorl.runtime.cli.main import cli, main
    from nemorl.runtime.config.base import BaseConfig, DataConfig, RunConfig, RuntimeConfig
    from nemorl.runtime.config.grpo import (
        AsyncConfig,
        CISPOLoss,
        ClippedLoss,
        GapConfig,
        GroupAdvantage,
        GRPOConfig,
        GSPOLoss,
        KLConfig,
        OffPolicyConfig,
        OverlongConfig,
        ReceiptsConfig,
        ReinforceLoss,
        ReinforcePlusPlusAdvantage,
        preset,
    )
    from nemorl.runtime.config.offline import (
        DPOConfig,
        DPOLoss,
        HingeLoss,
        IPOLoss,
        KTOLoss,
        ORPOLoss,
        SFTConfig,
        SimPOLoss,
    )
    from nemorl.runtime.config.tree import load_config
    from nemorl.runtime.engines.weights import sync_weights
    from nemorl.runtime.run.loop import Run, Step
    from nemorl.runtime.run.open_run import open_run, run
    from nemorl.runtime.run.registry import (
        get_algorithm,
        get_generation_backend,
        get_training_backend,
        register_advantage,
        register_algorithm,
        register_generation_backend,
        register_logger,
        register_loss,
        register_reward,
        register_training_backend,
    )
    from nemorl.runtime.run.saving import TrainResult
    from nemorl.runtime.store.state import RunView
    from nemorl.runtime.watch.callbacks import Callback, StopTraining
    from nemorl.runtime.watch.loggers import LoggedRun, MetricLogger
    from nemorl.runtime.watch.report import write_report
    from nemorl.runtime.workers.cluster import Bundle, RayVirtualCluster
    from nemorl.runtime.workers.worker import RayWorkerGroup

    __version__: str

__all__ = [
    "AsyncConfig",
    "BackendConfig",
    "BaseConfig",
    "Bundle",
    "CISPOLoss",
    "Callback",
    "ClippedLoss",
    "Completion",
    "ContextFull",
    "Conversation",
    "ConversationFailed",
    "DPOConfig",
    "DPOLoss",
    "DPOTrainer",
    "DataConfig",
    "DataModule",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "Episode",
    "Failure",
    "FunctionalRewardWrapper",
    "GRPOConfig",
    "GRPOTrainer",
    "GSPOLoss",
    "GapConfig",
    "GenerationBackend",
    "GenerationConfig",
    "GroupAdvantage",
    "HingeLoss",
    "IPOLoss",
    "Judge",
    "KLConfig",
    "KTOLoss",
    "LoRAConfig",
    "LoggedRun",
    "MetricLogger",
    "ModelConfig",
    "Needs",
    "ORPOLoss",
    "OffPolicyConfig",
    "OptimSettings",
    "OptimizerConfig",
    "Outcome",
    "OverlongConfig",
    "ParallelPlan",
    "Policy",
    "ProfileConfig",
    "RayVirtualCluster",
    "RayWorkerGroup",
    "ReceiptsConfig",
    "ReinforceLoss",
    "ReinforcePlusPlusAdvantage",
    "RewardServer",
    "RolloutConfig",
    "Run",
    "RunConfig",
    "RunView",
    "RuntimeConfig",
    "SFTConfig",
    "SFTTrainer",
    "SamplingParams",
    "Scores",
    "SimPOLoss",
    "Step",
    "StopTraining",
    "TokenBatch",
    "TrainResult",
    "TrainerConfig",
    "TrainingBackend",
    "Turn",
    "TurnResult",
    "__version__",
    "at_version",
    "cli",
    "data",
    "evaluate",
    "export",
    "generate",
    "get_algorithm",
    "get_generation_backend",
    "get_training_backend",
    "judged_in_processes",
    "load_config",
    "losses",
    "main",
    "needs",
    "open_run",
    "openenv",
    "policy_loss",
    "preset",
    "prove",
    "register_advantage",
    "register_algorithm",
    "register_generation_backend",
    "register_logger",
    "register_loss",
    "register_reward",
    "register_training_backend",
    "run",
    "sync_weights",
    "train",
    "write_report",
]

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
        "OptimSettings",
        "ProfileConfig",
        "TrainerConfig",
    ],
    "nemorl.parallel.plan": ["ParallelPlan"],
    "nemorl.parallel.proving": ["prove"],
    "nemorl.rollout.generation": ["Completion", "GenerationBackend", "SamplingParams", "Scores"],
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


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("nemorl")
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name in __all__:
        value = import_module(f"nemorl.{name}")
    else:
        raise AttributeError(f"module 'nemorl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
