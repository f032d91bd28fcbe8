"""Logits to tokens: processors by hand and against transformers, draws against the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.errors import ConfigError
from jaxlab.inference.sampling import (
    Processors,
    SamplingParams,
    apply_repetition_penalty,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    mark_present,
    processed_logits,
    processed_probabilities,
    row_settings,
    row_uniforms,
    sample,
)

# Compiled, for the tests that call them many times.
jitted_top_p, jitted_draw = jax.jit(keep_top_p), jax.jit(draw)


def logits_of(*probabilities: float) -> jnp.ndarray:
    return jnp.log(jnp.asarray([probabilities], jnp.float32))


def kept(logits: jax.Array) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(logits)]


def test_top_k_keeps_the_largest_and_what_ties_with_the_last():
    logits = jnp.asarray([[1.0, 5.0, 3.0, -2.0], [2.0, 2.0, 2.0, 1.0], [-1.0, -3.0, -2.0, -4.0]])
    assert kept(keep_top_k(logits, jnp.asarray([2, 1, 3]))) == [[1, 2], [0, 1, 2], [0, 1, 2]]
    assert kept(keep_top_k(logits, jnp.asarray([0, 4, 99]))) == [[0, 1, 2, 3]] * 3


def test_top_k_treats_both_zeros_alike():
    assert kept(keep_top_k(jnp.asarray([[0.0, -0.0, -1.0]]), jnp.asarray([1]))) == [[0, 1]]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.1, [0]),
        (0.45, [0]),
        (0.55, [0, 2]),  # 0.5 is not enough; the token that crosses is kept
        (0.75, [0, 2]),
        (0.9, [0, 1, 2]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, expected):
    logits = logits_of(0.5, 0.15, 0.3, 0.05)
    assert kept(keep_top_p(logits, jnp.asarray([p], jnp.float32))) == [expected]


def test_top_p_takes_only_as_many_of_equal_tokens_as_it_needs():
    assert kept(keep_top_p(jnp.zeros((1, 8)), jnp.asarray([0.5]))) == [[0, 1, 2, 3]]
    assert kept(keep_top_p(jnp.zeros((1, 8)), jnp.asarray([0.51]))) == [[0, 1, 2, 3, 4]]
    logits = logits_of(0.1, 0.4, 0.1, 0.4)
    assert kept(keep_top_p(logits, jnp.asarray([0.85]))) == [[0, 1, 3]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(0.01, 0.99), st.integers(2, 300))
def test_top_p_is_smallest_and_enough(seed, p, size):
    logits = jax.random.normal(jax.random.key(seed), (1, 300)) * 3
    logits = jnp.where(jnp.arange(300) < size, logits, -jnp.inf)
    probabilities = np.asarray(jax.nn.softmax(logits), np.float64)[0]
    chosen = np.flatnonzero(np.isfinite(jitted_top_p(logits, jnp.asarray([p]))[0]))
    mass = probabilities[chosen].sum()
    assert mass >= p - 1e-6
    assert mass - probabilities[chosen].min() < p + 1e-6
    assert probabilities[chosen].min() >= np.delete(probabilities, chosen).max(initial=0.0)


def test_min_p_is_relative_to_the_likeliest():
    logits = logits_of(0.5, 0.2, 0.05, 0.25)
    assert kept(keep_min_p(logits, jnp.asarray([0.3]))) == [[0, 1, 3]]
    assert kept(keep_min_p(logits, jnp.asarray([0.45]))) == [[0, 3]]
    assert kept(keep_min_p(logits, jnp.asarray([0.0]))) == [[0, 1, 2, 3]]
    assert kept(keep_min_p(logits, jnp.asarray([1.0]))) == [[0]]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = jnp.asarray([[2.0, -2.0, 3.0, -3.0]] * 2)
    presence = jnp.asarray([[True, True, False, False]] * 2)
    penalised = apply_repetition_penalty(logits, presence, jnp.asarray([2.0, 1.0]))
    np.testing.assert_array_equal(penalised, [[1.0, -4.0, 3.0, -3.0], [2.0, -2.0, 3.0, -3.0]])


def test_mark_present_leaves_out_padding():
    presence = mark_present(
        jnp.zeros((2, 4), bool),
        jnp.asarray([[1, 3], [2, 0]]),
        jnp.asarray([[True, True], [True, False]]),
    )
    np.testing.assert_array_equal(presence, [[0, 1, 0, 1], [0, 0, 1, 0]])


ROWS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=5, seed=2),
    SamplingParams(temperature=1.0, top_p=0.6, repetition_penalty=1.5, seed=3),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05, seed=4),
    SamplingParams(repetition_penalty=3.0),
)


@pytest.fixture(scope="module")
def batch() -> tuple[jax.Array, jax.Array]:
    logits = jax.random.normal(jax.random.key(0), (len(ROWS), 50)) * 2
    presence = jax.random.bernoulli(jax.random.key(1), 0.3, logits.shape)
    return logits, presence


def test_rows_of_a_batch_are_processed_as_each_alone(batch):
    logits, presence = batch
    values, processors = row_settings(ROWS)
    assert processors == Processors(random=True, truncated=True, penalised=True)
    together = processed_probabilities(logits, values, presence, processors=processors)
    np.testing.assert_allclose(together.sum(-1), 1.0, rtol=1e-5)
    for i, row in enumerate(ROWS):
        values, processors = row_settings([row])
        alone = processed_probabilities(
            logits[i : i + 1], values, presence[i : i + 1], processors=processors
        )
        np.testing.assert_allclose(together[i], alone[0], atol=1e-6)


def test_greedy_takes_the_lowest_of_equal_tokens():
    values, processors = row_settings([SamplingParams()])
    assert processors == Processors()
    logits = jnp.asarray([[1.0, 4.0, 4.0, 2.0]])
    assert sample(logits, values, jnp.asarray([0]), processors=processors).tolist() == [1]
    probabilities = processed_probabilities(logits, values, processors=processors)
    np.testing.assert_array_equal(probabilities, [[0.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("row", ROWS[1:5], ids=["temperature", "top_k", "top_p", "all"])
def test_samples_follow_the_processed_distribution(batch, row):
    """Chi-square against `processed_probabilities`; seeds are fixed, so the outcome is too."""
    draws = 20_000
    logits, presence = (x[1:2] for x in batch)
    values, processors = row_settings([row])
    expected = processed_probabilities(logits, values, presence, processors=processors)[0]

    def one(position):
        return sample(logits, values, position[None], presence, processors=processors)[0]

    tokens = jax.jit(jax.vmap(one))(jnp.arange(draws))
    counts = np.bincount(np.asarray(tokens), minlength=50)
    expected = np.asarray(expected, np.float64) * draws
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Five standard deviations of the chi-square distribution.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000])
def test_draw_inverts_the_cumulative_sum(size):
    weights = jnp.abs(jax.random.normal(jax.random.key(size), (1, size))) + 0.01
    ends = np.cumsum(np.asarray(weights[0], np.float64))
    middles = (ends - np.asarray(weights[0]) / 2) / ends[-1]
    drawn = jitted_draw(jnp.tile(weights, (size, 1)), jnp.asarray(middles, jnp.float32))
    np.testing.assert_array_equal(drawn, np.arange(size))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 1e-8, 0.1, 1.0]), min_size=40, max_size=40),
    st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-23, 1 - 2**-24]),
)
def test_draw_never_returns_a_token_of_weight_zero(weights, uniform):
    if not any(weights):
        weights[7] = 1.0
    index = int(
        jitted_draw(jnp.asarray([weights], jnp.float32), jnp.asarray([uniform], jnp.float32))[0]
    )
    assert weights[index] > 0


def test_uniforms_depend_on_seed_position_and_purpose_only():
    together = row_uniforms(jnp.asarray([1, 2, 1], jnp.uint32), jnp.asarray([5, 5, 6]))
    alone = row_uniforms(jnp.asarray([2], jnp.uint32), jnp.asarray([5]))
    assert together[1] == alone[0]
    other = row_uniforms(jnp.asarray([2], jnp.uint32), jnp.asarray([5]), purpose=1)
    assert len({*together.tolist(), *other.tolist()}) == 4


def test_changing_values_does_not_recompile(batch):
    logits, presence = batch
    jitted = jax.jit(sample, static_argnames="processors")
    for temperature in (0.5, 1.0, 2.0):
        rows = [row.replace(temperature=temperature, top_k=3, seed=9) for row in ROWS]
        values, processors = row_settings(rows)
        jitted(logits, values, jnp.arange(len(ROWS)), presence, processors=processors)
    assert jitted._cache_size() == 1


def test_penalty_without_presence_is_refused(batch):
    values, processors = row_settings([SamplingParams(repetition_penalty=2.0)])
    with pytest.raises(ValueError, match="presence"):
        processed_logits(batch[0][:1], values, processors=processors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0 .* 0 \(greedy\)"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1 .* None to keep all"),
        ({"top_k": 2.5}, "top_k=2.5 is not an integer"),
        ({"top_p": 0.0}, r"top_p=0\.0 .* above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 .* positive"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 .* at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"stop": ("",)}, "not empty"),
        ({"temperature": "hot"}, "'hot' is not a number"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**arguments)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_processors_equal_those_of_transformers(seed):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((3, 400)) * 3).astype(np.float32)
    history = rng.integers(0, 400, (3, 30))
    row = SamplingParams(
        temperature=0.6 + 0.3 * seed, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.3
    )
    scores = torch.from_numpy(logits)
    for processor in (
        hf.RepetitionPenaltyLogitsProcessor(row.repetition_penalty),
        hf.TemperatureLogitsWarper(row.temperature),
        hf.TopKLogitsWarper(row.top_k),
        hf.TopPLogitsWarper(row.top_p),
        hf.MinPLogitsWarper(row.min_p),
    ):
        scores = processor(torch.from_numpy(history), scores)
    values, processors = row_settings([row] * 3)
    presence = mark_present(
        jnp.zeros((3, 400), bool), jnp.asarray(history), jnp.ones((3, 30), bool)
    )
    ours = processed_logits(jnp.asarray(logits), values, presence, processors=processors)
    np.testing.assert_allclose(ours, scores.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 0.99, 0.999])
def test_top_p_equals_that_of_transformers(p):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import TopPLogitsWarper

    logits = np.random.default_rng(7).standard_normal((5, 2000)).astype(np.float32) * 4
    theirs = TopPLogitsWarper(p)(None, torch.from_numpy(logits)).numpy()
    ours = keep_top_p(jnp.asarray(logits), jnp.full(5, p, jnp.float32))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
