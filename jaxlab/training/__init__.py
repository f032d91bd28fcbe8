"""Training: state, pure steps, optimizers, meshes, checkpoints and the loop around them."""

from jaxlab.training.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxlab.training.sharding import MeshConfig, check_mesh, make_mesh, param_shardings
from jaxlab.training.step import TrainState, make_eval_step, make_train_step

__all__ = [
    "MeshConfig",
    "OptimizerConfig",
    "TrainState",
    "check_mesh",
    "make_eval_step",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "param_shardings",
]
