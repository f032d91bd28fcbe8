"""Checkpoints: what is kept, what a damaged one does, what does not fit."""

import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.errors import CheckpointError, StorageError
from jaxlab.training.checkpoint import Checkpointer
from jaxlab.training.step import TrainState


def make_state(step, width=64):
    params = {"layer": {"kernel": jnp.full((width, 32), float(step))}}
    state = TrainState.create(params, optax.adam(1e-3), jax.random.key(step), ema=True)
    return state.replace(step=jnp.asarray(step, jnp.int32))


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def save(checkpointer, step, loss=None, width=64):
    checkpointer.save(
        make_state(step, width),
        data_state={"position": step},
        model={"hidden_size": width, "dtype": "float32"},
        config={"name": "test"},
        validation_loss=loss,
    )


def truncate(path):
    """Halve every file of array data in a checkpoint."""
    files = [file for file in path.rglob("*") if file.is_file() and "/d/" in str(file)]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_everything_comes_back(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 3)
    checkpointer.wait()
    restored = Checkpointer(tmp_path).restore(abstract(make_state(0)))
    assert restored.step == 3
    assert restored.data_state == {"position": 3}
    assert restored.model["hidden_size"] == 64
    want = make_state(3)
    assert jax.tree.structure(restored.state) == jax.tree.structure(want)
    np.testing.assert_array_equal(
        jax.random.key_data(restored.state.rng), jax.random.key_data(want.rng)
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        (restored.state.params, restored.state.opt_state, restored.state.ema_params),
        (want.params, want.opt_state, want.ema_params),
    )


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    assert Checkpointer(tmp_path).restore(abstract(make_state(0))) is None


def test_the_latest_and_the_best_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, None, 2.5, 2.25], start=1):
        save(checkpointer, step, loss)
    checkpointer.wait()
    assert checkpointer.steps == [2, 5, 6]
    assert checkpointer.best_step == 2
    again = Checkpointer(tmp_path, keep=2)
    assert again.best_step == 2
    params = again.restore_params(2, abstract(make_state(0)).params)
    assert np.all(params["layer"]["kernel"] == 2)


def test_a_truncated_checkpoint_is_passed_over(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(checkpointer, step)
    checkpointer.close()
    truncate(tmp_path / "3" / "params")
    (tmp_path / "2" / "run" / "metadata").write_text("{")
    messages = []
    checkpointer = Checkpointer(tmp_path, keep=3)
    restored = checkpointer.restore(abstract(make_state(0)), tell=messages.append)
    assert restored.step == 1
    assert len(messages) == 2
    assert "checkpoints/3" in messages[0] or f"{tmp_path}/3" in messages[0]
    # They are out of the way of what will be saved at those steps.
    assert checkpointer.steps == [1]
    save(checkpointer, 3)
    checkpointer.wait()
    assert checkpointer.steps == [1, 3]


def test_a_save_that_was_cut_short_is_not_seen(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    save(checkpointer, 2)
    checkpointer.close()
    shutil.move(tmp_path / "2", tmp_path / "2.orbax-checkpoint-tmp")
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps == [1]
    assert checkpointer.restore(abstract(make_state(0))).step == 1


def test_nothing_readable_is_an_error(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.close()
    truncate(tmp_path / "1" / "state")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read: .*/1 "):
        Checkpointer(tmp_path).restore(abstract(make_state(0)))


def test_another_shape_names_the_parameter(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()
    with pytest.raises(
        CheckpointError, match=r"has layer/kernel of shape \[64, 32\], .* asks for \[48, 32\]"
    ):
        checkpointer.restore(abstract(make_state(0, width=48)))


def test_another_optimizer_names_what_is_missing(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()
    state = make_state(0)
    other = state.replace(opt_state=optax.sgd(1.0, momentum=0.9).init(state.params))
    with pytest.raises(CheckpointError, match=r"has no opt_state/.*trace.*another .*optimizer"):
        checkpointer.restore(abstract(other))


def test_another_model_names_the_field_and_a_free_field_does_not_matter(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()
    with pytest.raises(CheckpointError, match="hidden_size 64, now 48"):
        checkpointer.restore(abstract(make_state(0)), model={"hidden_size": 48})
    model = {"hidden_size": 64, "dtype": "bfloat16"}
    assert checkpointer.restore(abstract(make_state(0)), model=model).step == 1


def test_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpointer._manager, "save", full)
    with pytest.raises(StorageError, match=r"no space left on device.*Earlier checkpoints are"):
        save(checkpointer, 2)
    assert checkpointer.steps == [1]


def test_saving_does_not_read_memory_that_the_next_step_overwrites(tmp_path):
    @jax.jit
    def bump(state):
        return state.replace(params=jax.tree.map(lambda p: p + 1.0, state.params))

    step = jax.jit(bump, donate_argnums=0)
    checkpointer = Checkpointer(tmp_path)
    state = make_state(7, width=1024)
    checkpointer.save(state, data_state={}, model={}, config={})
    for _ in range(50):
        state = step(state)
    checkpointer.wait()
    restored = checkpointer.restore(abstract(make_state(0, width=1024)))
    assert np.all(restored.state.params["layer"]["kernel"] == 7)
