"""Several processes that train one model: how they meet, agree, and notice that one has died."""

import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from jaxlab.errors import ConfigError, JaxlabError
from jaxlab.training.config import DistributedConfig


class DistributedError(JaxlabError):
    """Another process of the run died, or could not be reached.

    A process that reports it should end by `os._exit`: threads that wait for the lost process, and
    jax's own disconnection, would otherwise keep it and then abort it.
    """

    exit_at_once = True


# At the end processes wait so long for each other to disconnect. Short, because a process that
# reports an error must not hang; `meet` has already waited for the slowest where all is well.
_SHUTDOWN_SECONDS = 10
_ADVICE = "Start all of them again: they resume from the last checkpoint"


def initialize(config: DistributedConfig) -> None:
    """Join the run's other processes, if there are any; before anything touches a device.

    A process that shows no sign of life for `config.peer_timeout` seconds counts as dead, and ends
    the others: with a `DistributedError` where one can be raised, else through the runtime, and
    then a line on stderr says so.

    Raises:
      ConfigError: the address is given but not the number of processes or which one this is.
      DistributedError: the others did not come.
    """
    if jax.distributed.is_initialized():
        return
    address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None and not config.auto:
        return
    count = _number(config.num_processes, "num_processes", "JAX_NUM_PROCESSES")
    index = _number(config.process_id, "process_id", "JAX_PROCESS_ID")
    if not config.auto and (count is None or index is None):
        missing = "num_processes" if count is None else "process_id"
        raise ConfigError(
            f"distributed.coordinator_address is {address} but distributed.{missing} is missing: "
            f"give it, or JAX_{missing.upper()}, or set distributed.auto"
        )
    if count is not None and index is not None and index >= count:
        raise ConfigError(
            f"distributed.process_id {index} is not below distributed.num_processes {count}"
        )
    # What CPU devices of different processes talk through; other platforms have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=count,
            process_id=index,
            heartbeat_timeout_seconds=config.peer_timeout,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"the {count or ''} processes of this run could not meet at {address or 'the cluster'}"
            f": {_first_line(error)}"
        ) from error
    _call_witness()


# Told what to say, and then that all is well. If it ends without having been told, it says it.
_WITNESS = """
import sys
message = sys.stdin.readline()
if not sys.stdin.readline():
    sys.stderr.write(message)
"""
_witness: subprocess.Popen | None = None


def _call_witness() -> None:
    """Start a process that speaks if this one is ended without a chance to.

    The runtime answers the death of another process by aborting, from a thread of its own, with a
    stack trace for an explanation. It offers no way to do anything else first, and the main thread
    may at that time be waiting in it for ever.
    """
    global _witness
    _witness = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WITNESS],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not meant for it
    )
    assert _witness.stdin is not None
    _witness.stdin.write(
        f"error: process {jax.process_index()} of {jax.process_count()} was killed, or was ended "
        "by the runtime because another one is lost (then the lines above tell which). "
        f"{_ADVICE}\n"
    )
    _witness.stdin.flush()
    atexit.register(_dismiss_witness)


def _dismiss_witness() -> None:
    global _witness
    if _witness is not None and _witness.stdin is not None:
        with contextlib.suppress(OSError):  # it is gone already
            _witness.stdin.write("all is well\n")
            _witness.stdin.close()
        _witness.wait()
        _witness = None


def _number(given: int | None, name: str, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{variable} is {text!r}, which is no number: give distributed.{name}"
        ) from None


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Turn the runtime's complaint about a vanished process into a `DistributedError`."""
    try:
        yield
    except Exception as error:
        if not lost_a_peer(error):
            raise
        _dismiss_witness()
        raise DistributedError(
            f"lost one of the {jax.process_count()} processes of this run: {_first_line(error)}. "
            f"{_ADVICE}"
        ) from error


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error is the runtime's way to say that another process is gone."""
    if jax.process_count() == 1 or isinstance(error, JaxlabError):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and _is_about_peers(
        str(error)
    )


def _is_about_peers(message: str) -> bool:
    signs = (
        "gloo",
        "connection",
        "peer",
        "heartbeat",
        "coordination",
        "unavailable",
        "deadline_exceeded",
        "task",
        "barrier",
        "socket",
    )
    return any(sign in message.lower() for sign in signs)


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def meet(name: str) -> None:
    """Wait for all processes, up to 20 minutes.

    Through the coordination service and not the devices: gloo gives up after 30 seconds where
    processes begin to talk, and one may well compile or load so much longer than another.
    """
    if jax.process_count() > 1:
        multihost.get_barrier_sync_fn()(key=name, timeout_ms=20 * 60 * 1000)


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows of all processes, in the order of the processes."""
    if jax.process_count() == 1:
        return rows
    return np.asarray(multihost_utils.process_allgather(rows)).reshape(-1, *rows.shape[1:])


class Agreement:
    """The largest number that any process says, without waiting for it.

    `say` starts a reduction between the processes and gives an array to read a step later. All
    processes then read the same, so they can act on it at the same step.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._size = mesh.size
        self._largest = jax.jit(
            lambda numbers: numbers.max(), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def say(self, number: int) -> Any:
        if jax.process_count() == 1:
            return number
        numbers = jax.make_array_from_callback(
            (self._size,),
            self._sharding,
            lambda index: np.full((self._size,), number, np.int32)[index],
        )
        return self._largest(numbers)


def process_rows(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, int]:
    """Which share of a batch's rows this process has to read: (index, number of shares).

    `(0, 1)`, the whole batch, unless the devices of every process hold the contiguous share that
    its index says.
    """
    count = jax.process_count()
    share, remainder = divmod(shape[0], count)
    if remainder:
        return 0, 1
    for device, index in sharding.devices_indices_map(shape).items():
        start, stop, _ = index[0].indices(shape[0])
        first = device.process_index * share
        if start < first or stop > first + share:
            return 0, 1
    return jax.process_index(), count


def global_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding, share: tuple[int, int]
) -> dict[str, jax.Array]:
    """This process' rows of a batch as its part of arrays over the whole mesh."""
    index, count = share

    def place(local: np.ndarray) -> jax.Array:
        first = index * local.shape[0]
        shape = (local.shape[0] * count, *local.shape[1:])

        def part(wanted: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = wanted[0].indices(shape[0])
            return local[(slice(start - first, stop - first), *wanted[1:])]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: place(local) for name, local in batch.items()}
