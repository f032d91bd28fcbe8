"""Rows of mLSTM cut, packed, padded and summarised: the numbers do not notice."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mlstm_inputs import error, memory, reference, row, rows, xla

from pallas_kernels.mlstm import (
    MLSTMSummary,
    mlstm,
    mlstm_compose,
    mlstm_step,
    mlstm_summary,
)

TIME = 24
few = hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**16)


def close(actual, expected, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(x, y) < tolerance


def packed(seed):
    """Segment ids and a mask, of any kind."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 3, size=(2, TIME)).repeat(rng.integers(1, 9), axis=1)[:, :TIME]
    mask = rng.random((2, TIME)) > rng.choice([0.0, 0.2, 0.9])
    return jnp.asarray(ids, jnp.int32), jnp.asarray(mask)


@few
@hypothesis.given(seeds, st.sampled_from([1, 7, 8, 24]), st.sampled_from([3.0, 15.0]))
def test_any_chunk_size_is_the_definition(seed, chunk_size, gates):
    ids, mask = packed(seed)
    given = dict(
        initial_state=memory(seed), segment_ids=ids, mask=mask, previous_segment=ids[:, 0] * 0
    )
    arguments = row(seed, TIME, gates=gates)
    expected = reference(*arguments, **given)
    # q·n may cancel where gates are extreme.
    tolerance = 2e-5 if gates < 10 else 5e-4
    close(xla(*arguments, **given, chunk_size=chunk_size, return_state=True), expected, tolerance)


@few
@hypothesis.given(seeds, st.sampled_from([1, 11, 16]))
def test_rows_are_cut_anywhere(seed, cut):
    """Documents and padding too, with the id of the last token that is no padding."""
    ids, mask = packed(seed)
    mask = mask.at[:, 0].set(True)
    arguments, state = row(seed, TIME), memory(seed)
    run = functools.partial(xla, chunk_size=8, return_state=True)
    whole = run(*arguments, initial_state=state, segment_ids=ids, mask=mask)
    h, state = run(
        *rows(arguments, slice(None), slice(cut)),
        initial_state=state,
        segment_ids=ids[:, :cut],
        mask=mask[:, :cut],
    )
    last = cut - 1 - jnp.argmax(mask[:, :cut][:, ::-1], axis=1)
    rest, state = run(
        *rows(arguments, slice(None), slice(cut, None)),
        initial_state=state,
        previous_segment=ids[jnp.arange(2), last],
        segment_ids=ids[:, cut:],
        mask=mask[:, cut:],
    )
    close((jnp.concatenate([h, rest], axis=1), state), whole)


def test_steps_give_the_row():
    arguments, state = row(1, TIME), memory(1)
    h, last = xla(*arguments, initial_state=state, chunk_size=8, return_state=True)
    step = jax.jit(mlstm_step)
    for t in range(TIME):
        token, state = step(*rows(arguments, slice(None), t), state)
        assert error(token, h[:, t]) < 2e-5
    close(state, last)
    q, k, v, i, f = rows(arguments, slice(None), 0)
    _, same = step(q, k, v, jnp.full_like(i, -jnp.inf), jnp.full_like(f, jnp.inf), state)
    for x, y in zip(same, state, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_padding_is_as_if_it_were_not_there(input_gate):
    """Left, right and in the middle, whatever it holds; gradients too."""
    run = functools.partial(xla, input_gate=input_gate, chunk_size=8)
    arguments = row(2, 16)
    h, state = run(*arguments, return_state=True)
    expected = jax.grad(lambda a: jnp.sum(run(*a) ** 2))(arguments)
    for columns in (range(8, 24), range(16), [0, *range(4, 11), *range(16, 24)]):
        place = np.array(columns)
        mask = jnp.zeros((2, TIME), bool).at[:, place].set(True)
        padded = tuple(
            jnp.full((2, TIME, *x.shape[2:]), jnp.nan).at[:, place].set(x) for x in arguments
        )
        h_padded, state_padded = run(*padded, mask=mask, return_state=True)
        close((h_padded[:, place], state_padded), (h, state), 2e-6)
        np.testing.assert_array_equal(h_padded[~mask], 0)
        gradients = jax.grad(lambda a, mask=mask: jnp.sum(run(*a, mask=mask) ** 2))(padded)
        for x, y in zip(gradients, expected, strict=True):
            assert error(x[:, place], y) < 1e-5
            np.testing.assert_array_equal(x[~mask], 0)


def test_packed_documents_are_rows_of_their_own():
    """Outputs, gradients and the state after the last; ids that come back are new documents."""
    arguments = row(3, TIME)
    ids = jnp.array([[4] * 5 + [0] + [4] * 18, [1] * 16 + [2] * 8])
    given = dict(segment_ids=ids, chunk_size=8)

    def loss(arguments, **given):
        h = xla(*arguments, **given)
        return jnp.sum(jnp.tanh(h)), h

    gradients, h = jax.grad(loss, has_aux=True)(arguments, **given)
    _, state = xla(*arguments, **given, return_state=True)
    for b, start, stop in ((0, 0, 5), (0, 5, 6), (0, 6, 24), (1, 0, 16), (1, 16, 24)):
        document = rows(arguments, slice(b, b + 1), slice(start, stop))
        alone, alone_h = jax.grad(loss, has_aux=True)(document, chunk_size=8)
        assert error(h[b : b + 1, start:stop], alone_h) < 2e-6
        for x, y in zip(gradients, alone, strict=True):
            # A document of one token has no gradient of its forget gate but rounding.
            np.testing.assert_allclose(x[b : b + 1, start:stop], y, atol=1e-5)
        if stop == TIME:
            _, last = xla(*document, chunk_size=8, return_state=True)
            close(tuple(x[b : b + 1] for x in state), last, 2e-6)


def test_nothing_leaks_into_a_document_written_softly():
    """What a document writes with exp(15) is not read in one that writes with exp(-15)."""
    q, k, v, _, _ = row(4, TIME)
    ids = jnp.repeat(jnp.arange(2), TIME // 2)[None].repeat(2, axis=0)
    i = jnp.where(ids[..., None] == 0, 15.0, -15.0) * jnp.ones((1, 1, 2))
    f = jnp.full_like(i, 15.0)
    first = ids == 0
    for call in (reference, functools.partial(xla, chunk_size=8, return_state=True)):
        h, state = call(q, k, v, i, f, segment_ids=ids)
        other = jnp.where(first[..., None, None], 10 * v, v)
        h_other, state_other = call(q, k, other, i, f, segment_ids=ids)
        np.testing.assert_array_equal(h_other[~first], h[~first])
        np.testing.assert_array_equal(state_other[0], state[0])

    def second(v):
        return jnp.sum(xla(q, k, v, i, f, segment_ids=ids, chunk_size=8)[~first])

    np.testing.assert_array_equal(jax.grad(second)(v)[first], 0)


def summaries(arguments, ids, mask, cuts, **options):
    """Of the stretches between the cuts."""
    out = []
    for start, stop in zip((0, *cuts), (*cuts, TIME), strict=True):
        part = rows(arguments[1:], slice(None), slice(start, stop))
        given = {}
        if ids is not None:
            given["segment_ids"] = ids[:, start:stop]
            given["previous_segment"] = ids[:, start - 1] if start else ids[:, 0]
        if mask is not None:
            given["mask"] = mask[:, start:stop]
        out.append(jitted_summary(*part, **given, **options))
    return out


jitted_summary = jax.jit(mlstm_summary, static_argnames="input_gate")


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_summaries_compose_to_the_state(input_gate):
    arguments, state = row(5, TIME), memory(5)
    if input_gate == "sigmoid":
        state = (*state[:2], jnp.zeros_like(state[2]))
    ids = jnp.array([[1] * 10 + [2] * 14, [1] * 24])
    mask = jnp.ones((2, TIME), bool).at[0, 8:16].set(False)  # a stretch of nothing but padding
    for given in (dict(ids=None, mask=None), dict(ids=ids, mask=None), dict(ids=None, mask=mask)):
        parts = summaries(arguments, cuts=(8, 16), input_gate=input_gate, **given)
        run = functools.partial(
            xla,
            *arguments,
            segment_ids=given["ids"],
            mask=given["mask"],
            input_gate=input_gate,
            chunk_size=8,
            return_state=True,
        )
        _, expected = run(initial_state=state)
        start = MLSTMSummary.of_state(state)
        left = functools.reduce(mlstm_compose, parts, start)
        close(left.state, expected, 2e-6)
        right = mlstm_compose(start, mlstm_compose(parts[0], mlstm_compose(*parts[1:])))
        close(right.state, expected, 2e-6)
        if given["ids"] is not None:
            np.testing.assert_array_equal(right.g[0], -jnp.inf)


def test_stretches_on_several_devices():
    """Each computes its tokens from the summaries of those before; gradients cross them."""
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    arguments = row(6, 32)
    ids = jnp.array([[1] * 13 + [2] * 19, [1] * 32])
    before = jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)  # each token's previous id

    def stretch(q, k, v, i, f, ids, before):
        given = dict(segment_ids=ids, previous_segment=before[:, 0])
        summary = jax.lax.all_gather(mlstm_summary(k, v, i, f, **given), "sequence")
        batch, _, heads, dqk = k.shape
        state = MLSTMSummary.of_state(
            (
                jnp.zeros((batch, heads, dqk, v.shape[-1])),
                jnp.zeros((batch, heads, dqk)),
                jnp.zeros((batch, heads)),
            )
        )
        for device in range(3):
            earlier = device < jax.lax.axis_index("sequence")
            longer = mlstm_compose(state, jax.tree.map(lambda x, d=device: x[d], summary))
            state = jax.tree.map(lambda x, y, e=earlier: jnp.where(e, x, y), longer, state)
        return mlstm(q, k, v, i, f, initial_state=state.state, chunk_size=4, **given)

    by_time = jax.sharding.PartitionSpec(None, "sequence")
    sharded = jax.shard_map(
        stretch, mesh=mesh, in_specs=(by_time,) * 7, out_specs=by_time, check_vma=False
    )

    def loss(call, *rest):
        def of(arguments):
            h = call(*arguments, *rest)
            return jnp.sum(jnp.tanh(h)), h

        return jax.jit(jax.grad(of, has_aux=True))(arguments)

    actual, h = loss(sharded, ids, before)
    expected, expected_h = loss(lambda *a: mlstm(*a, segment_ids=ids, chunk_size=8))
    assert error(h, expected_h) < 2e-6
    close(actual, expected, 1e-5)
