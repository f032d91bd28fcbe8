"""Training: state, pure steps, optimizers, meshes, checkpoints and the loop around them."""

from jaxlab.training.config import ExperimentConfig
from jaxlab.training.loop import FitResult, fit
from jaxlab.training.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxlab.training.reporter import Reporter
from jaxlab.training.sharding import MeshConfig, check_mesh, make_mesh, param_shardings
from jaxlab.training.step import TrainState, make_eval_step, make_train_step

__all__ = [
    "ExperimentConfig",
    "FitResult",
    "MeshConfig",
    "OptimizerConfig",
    "Reporter",
    "TrainState",
    "check_mesh",
    "fit",
    "make_eval_step",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "param_shardings",
]
