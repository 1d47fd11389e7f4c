# ruff: noqa: I001
"""The public names, for type checkers and for nemorl/__init__.py, which reads them here."""

from nemorl import data as data, losses as losses
from nemorl.data.batch import TokenBatch as TokenBatch
from nemorl.data.sources import DataModule as DataModule
from nemorl.losses.types import Needs as Needs, needs as needs
from nemorl.parallel.backend import TrainingBackend as TrainingBackend
from nemorl.parallel.config import (
    BackendConfig as BackendConfig,
    LoRAConfig as LoRAConfig,
    ModelConfig as ModelConfig,
    OptimSettings as OptimSettings,
    OptimizerConfig as OptimizerConfig,
    ProfileConfig as ProfileConfig,
    TrainerConfig as TrainerConfig,
)
from nemorl.parallel.plan import ParallelPlan as ParallelPlan
from nemorl.parallel.proving import prove as prove
from nemorl.rollout.config import (
    GenerationConfig as GenerationConfig,
    RolloutConfig as RolloutConfig,
)
from nemorl.rollout.conversation import (
    ContextFull as ContextFull,
    Conversation as Conversation,
    ConversationFailed as ConversationFailed,
    Episode as Episode,
    Failure as Failure,
    Outcome as Outcome,
    Policy as Policy,
    Turn as Turn,
)
from nemorl.rollout.environment import (
    EnvironmentInterface as EnvironmentInterface,
    EnvironmentReturn as EnvironmentReturn,
    FunctionalRewardWrapper as FunctionalRewardWrapper,
)
from nemorl.rollout.environments.classes import TurnResult as TurnResult
from nemorl.rollout.environments.openenv import openenv as openenv
from nemorl.rollout.generation import (
    Completion as Completion,
    GenerationBackend as GenerationBackend,
    SamplingParams as SamplingParams,
    Scores as Scores,
)
from nemorl.rollout.judge import Judge as Judge, RewardServer as RewardServer
from nemorl.rollout.processes import judged_in_processes as judged_in_processes
from nemorl.runtime.algorithms.policy_loss import (
    at_version as at_version,
    policy_loss as policy_loss,
)
from nemorl.runtime.cli.api import (
    DPOTrainer as DPOTrainer,
    DistillTrainer as DistillTrainer,
    GRPOTrainer as GRPOTrainer,
    PPOTrainer as PPOTrainer,
    SFTTrainer as SFTTrainer,
    train as train,
)
from nemorl.runtime.cli.inference import (
    evaluate as evaluate,
    export as export,
    generate as generate,
)
from nemorl.runtime.cli.main import cli as cli, main as main
from nemorl.runtime.config.base import (
    BaseConfig as BaseConfig,
    DataConfig as DataConfig,
    RunConfig as RunConfig,
    RuntimeConfig as RuntimeConfig,
)
from nemorl.runtime.config.distill import (
    DistillConfig as DistillConfig,
    SampledTokens as SampledTokens,
    TeacherConfig as TeacherConfig,
    TopTokens as TopTokens,
)
from nemorl.runtime.config.grpo import (
    AsyncConfig as AsyncConfig,
    CISPOLoss as CISPOLoss,
    ClippedLoss as ClippedLoss,
    GMPOLoss as GMPOLoss,
    GRPOConfig as GRPOConfig,
    GSPOLoss as GSPOLoss,
    GapConfig as GapConfig,
    GroupAdvantage as GroupAdvantage,
    KLConfig as KLConfig,
    OffPolicyConfig as OffPolicyConfig,
    OverlongConfig as OverlongConfig,
    PassAtKAdvantage as PassAtKAdvantage,
    ReceiptsConfig as ReceiptsConfig,
    ReinforceLoss as ReinforceLoss,
    ReinforcePlusPlusAdvantage as ReinforcePlusPlusAdvantage,
    SAPOLoss as SAPOLoss,
    preset as preset,
)
from nemorl.runtime.config.offline import (
    DPOConfig as DPOConfig,
    DPOLoss as DPOLoss,
    HingeLoss as HingeLoss,
    IPOLoss as IPOLoss,
    KTOLoss as KTOLoss,
    ORPOLoss as ORPOLoss,
    RMConfig as RMConfig,
    SFTConfig as SFTConfig,
    SimPOLoss as SimPOLoss,
)
from nemorl.runtime.config.ppo import (
    CriticConfig as CriticConfig,
    GAEAdvantage as GAEAdvantage,
    PPOConfig as PPOConfig,
)
from nemorl.runtime.config.tree import load_config as load_config
from nemorl.runtime.engines.weights import sync_weights as sync_weights
from nemorl.runtime.run.connect import connect as connect
from nemorl.runtime.run.loop import Run as Run, Step as Step
from nemorl.runtime.run.open_run import open_run as open_run, run as run
from nemorl.runtime.run.registry import (
    get_algorithm as get_algorithm,
    get_generation_backend as get_generation_backend,
    get_training_backend as get_training_backend,
    register_advantage as register_advantage,
    register_algorithm as register_algorithm,
    register_generation_backend as register_generation_backend,
    register_logger as register_logger,
    register_loss as register_loss,
    register_reward as register_reward,
    register_training_backend as register_training_backend,
)
from nemorl.runtime.run.saving import TrainResult as TrainResult
from nemorl.runtime.serve.agents import agent as agent
from nemorl.runtime.store.state import RunView as RunView
from nemorl.runtime.watch.callbacks import Callback as Callback, StopTraining as StopTraining
from nemorl.runtime.watch.loggers import LoggedRun as LoggedRun, MetricLogger as MetricLogger
from nemorl.runtime.watch.report import write_report as write_report
from nemorl.runtime.workers.cluster import Bundle as Bundle, RayVirtualCluster as RayVirtualCluster
from nemorl.runtime.workers.worker import RayWorkerGroup as RayWorkerGroup

__version__: str
