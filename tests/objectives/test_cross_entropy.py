"""Cross-entropy: the chunked one against the dense one, and the dense one against log_softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.objectives import chunked_cross_entropy, cross_entropy

BATCH, TIME, WIDTH, VOCAB = 4, 24, 16, 50


@pytest.fixture
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "hidden": jax.random.normal(keys[0], (BATCH, TIME, WIDTH)),
        "embedding": jax.random.normal(keys[1], (VOCAB, WIDTH)),
        "targets": jax.random.randint(keys[2], (BATCH, TIME), 0, VOCAB),
        "mask": jax.random.bernoulli(keys[3], 0.7, (BATCH, TIME)).astype(jnp.float32),
    }


def softcapped(embedding, softcap):
    def unembed(hidden):
        logits = jnp.einsum("...d,vd->...v", hidden, embedding.astype(hidden.dtype))
        return softcap * jnp.tanh(logits / softcap) if softcap else logits

    return unembed


def test_equals_log_softmax(problem):
    logits = softcapped(problem["embedding"], None)(problem["hidden"])
    loss, metrics = cross_entropy(logits, problem["targets"], problem["mask"])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    picked = np.take_along_axis(log_p, np.asarray(problem["targets"])[..., None], -1)[..., 0]
    mask = np.asarray(problem["mask"])
    np.testing.assert_allclose(loss, -(picked * mask).sum() / mask.sum(), rtol=1e-6)
    assert metrics["weight"] == mask.sum()


def test_z_loss_is_the_mean_squared_log_normaliser(problem):
    logits = softcapped(problem["embedding"], None)(problem["hidden"])
    plain, _ = cross_entropy(logits, problem["targets"])
    loss, metrics = cross_entropy(logits, problem["targets"], z_loss=0.1)
    expected = 0.1 * np.mean(np.asarray(jax.nn.logsumexp(logits, -1)) ** 2)
    np.testing.assert_allclose(metrics["z_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(loss - plain, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy"], plain, rtol=1e-6)


@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (5.0, 1e-2)])
@pytest.mark.parametrize(
    ("chunk_size", "shards"),
    [(8, (1, 1)), (7, (1, 1)), (1000, (1, 1)), (5, (2, 2)), (4, (4, 3))],
)
def test_chunked_equals_dense(problem, softcap, z_loss, chunk_size, shards):
    targets, mask = problem["targets"], problem["mask"]

    def dense(hidden, embedding):
        return cross_entropy(softcapped(embedding, softcap)(hidden), targets, mask, z_loss)

    def chunked(hidden, embedding):
        return chunked_cross_entropy(
            hidden,
            softcapped(embedding, softcap),
            targets,
            mask,
            chunk_size=chunk_size,
            z_loss=z_loss,
            shards=shards,
        )

    arguments = problem["hidden"], problem["embedding"]
    (want, want_metrics), want_gradients = jax.value_and_grad(dense, (0, 1), has_aux=True)(
        *arguments
    )
    (got, got_metrics), gradients = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(
        *arguments
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got_metrics, want_metrics
    )
    for gradient, expected in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-6)
    # The path without differentiation is another one.
    np.testing.assert_allclose(jax.jit(chunked)(*arguments)[0], want, rtol=1e-6)


def test_gradient_of_a_scaled_loss(problem):
    def loss(embedding, factor):
        value, _ = chunked_cross_entropy(
            problem["hidden"], softcapped(embedding, None), problem["targets"], chunk_size=6
        )
        return factor * value

    once = jax.grad(loss)(problem["embedding"], 1.0)
    thrice = jax.grad(loss)(problem["embedding"], 3.0)
    np.testing.assert_allclose(thrice, 3 * once, rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [8, 24])
def test_no_target_at_all_gives_zero_and_zero_gradient(problem, chunk_size):
    def loss(hidden, embedding):
        return chunked_cross_entropy(
            hidden,
            softcapped(embedding, None),
            jnp.full((BATCH, TIME), -100),
            jnp.zeros((BATCH, TIME)),
            chunk_size=chunk_size,
        )

    (value, metrics), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        problem["hidden"], problem["embedding"]
    )
    assert value == 0
    assert metrics["weight"] == 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_masked_infinities_do_not_spread(problem):
    hidden = problem["hidden"].at[0, 3].set(jnp.inf)
    mask = jnp.ones((BATCH, TIME)).at[0, 3].set(0)
    loss, _ = cross_entropy(
        softcapped(problem["embedding"], None)(hidden), problem["targets"], mask
    )
    assert np.isfinite(loss)


def test_bfloat16_hidden_states_keep_float32_statistics(problem):
    hidden = problem["hidden"].astype(jnp.bfloat16)
    embedding = problem["embedding"].astype(jnp.bfloat16)

    def chunked(hidden, embedding):
        unembed = softcapped(embedding, None)
        return chunked_cross_entropy(
            hidden, lambda h: unembed(h).astype(jnp.float32), problem["targets"], chunk_size=8
        )[0]

    def dense(hidden, embedding):
        logits = softcapped(embedding, None)(hidden).astype(jnp.float32)
        return cross_entropy(logits, problem["targets"])[0]

    got, gradients = jax.value_and_grad(chunked, (0, 1))(hidden, embedding)
    want, expected = jax.value_and_grad(dense, (0, 1))(hidden, embedding)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            gradient.astype(np.float32), reference.astype(np.float32), atol=4e-3
        )


def test_whole_logits_are_never_in_memory():
    batch, time, width, vocab = 2, 512, 8, 4096
    hidden = jax.ShapeDtypeStruct((batch, time, width), jnp.float32)
    embedding = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def loss(hidden, embedding, targets, chunk_size):
        return chunked_cross_entropy(
            hidden, softcapped(embedding, None), targets, chunk_size=chunk_size
        )[0]

    def temporary_bytes(chunk_size):
        step = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3)
        compiled = step.lower(hidden, embedding, targets, chunk_size).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = batch * time * vocab * 4
    assert temporary_bytes(time) > whole
    assert temporary_bytes(32) < whole / 4


@pytest.mark.parametrize(("chunk_size", "shards"), [(0, (1, 1)), (8, (3, 1)), (8, (1, 5))])
def test_impossible_chunks_are_refused(problem, chunk_size, shards):
    with pytest.raises(ValueError, match=r"chunk_size is 0|do not divide into"):
        chunked_cross_entropy(
            problem["hidden"],
            softcapped(problem["embedding"], None),
            problem["targets"],
            chunk_size=chunk_size,
            shards=shards,
        )
