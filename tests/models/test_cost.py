"""Counts of an xLSTM's arithmetic and memory against its parameters, and against plain counting."""

import pytest

from jaxlab.models.cost import cost_of
from jaxlab.models.xlstm import cost
from jaxlab.models.xlstm.config import XLSTMConfig
from jaxlab.training import roofline

SEVEN_B = XLSTMConfig.preset("7b", dtype="bfloat16", param_dtype="bfloat16")


def test_the_products_of_7b_are_its_parameters():
    # 6,865,424,896 in the published checkpoint, less the embedding, norms and gate biases.
    others = 50304 * 4096 + (32 * 3 + 1) * 4096 + 32 * 2 * 8
    assert cost_of(SEVEN_B).matmul_params(SEVEN_B) == 6_865_424_896 - others


def test_a_cell_by_the_formula_of_its_chunks():
    config = XLSTMConfig.preset("7b", chunk_size=64)
    keys, values, heads = 256, 512, 8
    one = 4 * 64 * keys * values + 2 * keys * values + 2 * 64**2 * (1 + keys + values)
    assert cost.cell_flops(config, 64) == heads * one
    # A last chunk of 10 tokens is counted as what it has.
    last = 4 * 10 * keys * values + 2 * keys * values + 2 * 10**2 * (1 + keys + values)
    assert cost.cell_flops(config, 3 * 64 + 10) == heads * (3 * one + last)
    assert cost.mixing_flops(config, 64, 10_000) == 32 * heads * one
    # A token: the memory is decayed and updated, and read.
    assert cost.cell_flops(config, 1) == pytest.approx(heads * 6 * keys * values, rel=0.01)


def test_the_state_of_7b():
    # C, n and m of 8 heads in 32 blocks, float32; halved but for m in bfloat16.
    assert cost.state_bytes(SEVEN_B, 1) == 32 * 8 * (256 * 512 + 256 + 1) * 4
    assert cost.state_bytes(SEVEN_B.replace(state_dtype="bfloat16"), 3) == 3 * 32 * 8 * (
        (256 * 512 + 256) * 2 + 4
    )
    cache = cost.cache_bytes(SEVEN_B, 2, 10**6)
    assert cache == cost.cache_bytes(SEVEN_B, 2, 10)
    # 16 tokens that can be taken back, and 16 more before the state is written.
    pending = 2 * 32 * 8 * 32 * ((256 + 512) * 2 + 2 * 4)
    assert cache == cost.state_bytes(SEVEN_B, 2) + pending + 2 * 3 * 4


def test_slstm_blocks_have_counts_of_their_own():
    config = XLSTMConfig.preset("165m", block_pattern="mmms")
    plain = XLSTMConfig.preset("165m")
    assert cost.mixing_flops(config, 100, 100) == cost.mixing_flops(plain, 100, 100) * 9 / 12
    slstm = 8 * 768**2 // 4 + 3 * 768 * 1024 + 4 * 768
    mlstm = 768 * (2 * 384 + 3 * 768 + 8) + 3 * 768 * 2048
    unembedding = 768 * 50304
    assert cost.matmul_params(plain) == 12 * mlstm + unembedding
    assert cost.matmul_params(config) == 9 * mlstm + 3 * slstm + unembedding


def test_work_does_not_grow_with_the_context():
    mesh = {"data": 1, "fsdp": 8, "tensor": 1, "sequence": 1}
    shape = {"batch_size": 16, "mesh": mesh, "num_params": 6_865_424_896}
    short = roofline.decode_work(SEVEN_B, context=128, **shape)
    assert short == roofline.decode_work(SEVEN_B, context=1_000_000, **shape)
    state = cost.cache_bytes(SEVEN_B, 1, 1) + cost.state_bytes(SEVEN_B, 1) / 16
    assert short.hbm_bytes == 2 * 6_865_424_896 + 16 / 8 * state

    training = {"accumulate": 1, "mesh": mesh, "num_params": 6_865_424_896, "optimizer_bytes": 0.0}
    once = roofline.train_work(SEVEN_B, batch_size=16, sequence_length=8192, **training)
    long = roofline.train_work(SEVEN_B, batch_size=1, sequence_length=16 * 8192, **training)
    assert long.model_flops == once.model_flops
