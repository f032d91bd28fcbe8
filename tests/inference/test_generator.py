"""Generation: equal to the plain loop, whatever the batch, the blocks or the stream."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.errors import PromptError
from jaxlab.inference import Generator, SamplingParams, generate, row_settings, stream
from jaxlab.inference.buckets import batch_bucket
from jaxlab.models import ModelConfig, Transformer, init_cache, init_params, unstack_layers

CONTEXT = 160
CONFIG = ModelConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.3,  # far from uniform, so that a wrong mask or position shows
)
MODULE = Transformer(CONFIG)
PROMPTS = ["Hi", "The quick brown fox jumps", [5], "one two three four five six seven eight nine"]
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def params():
    return init_params(MODULE, jax.random.key(0))


@pytest.fixture(scope="module")
def generator(params):
    return Generator(MODULE, params, TOKENIZER)


@pytest.fixture(scope="module")
def endless(params):
    """A generator that no end-of-sequence token ends."""
    return Generator(MODULE, params)


def encode(prompt) -> list[int]:
    return TOKENIZER.encode(prompt, True) if isinstance(prompt, str) else prompt


@pytest.fixture(scope="module")
def plain_greedy(params):
    """The likeliest continuation, by running the whole text through the model for every token."""
    apply = jax.jit(lambda tokens: MODULE.apply({"params": params}, tokens))

    def continued(ids: list[int], new: int) -> list[int]:
        ids = list(ids)
        start = len(ids)
        for _ in range(new):
            padded = np.zeros((1, 128), np.int32)
            padded[0, : len(ids)] = ids
            ids.append(int(jnp.argmax(apply(padded)[0, len(ids) - 1])))
        return ids[start:]

    return continued


def test_greedy_equals_the_plain_loop(endless, plain_greedy):
    prompts = [encode(prompt) for prompt in PROMPTS]
    # More than two device calls' worth.
    results = endless.generate(prompts, SamplingParams(max_new_tokens=70))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_greedy(prompt, 70)
        assert result.finish_reason == "length"
        assert result.prompt_length == len(prompt)
        assert result.text == ""


def test_stacked_and_unstacked_layers_generate_the_same(params, endless):
    stacked = Generator(MODULE, params, unstack=False)
    assert endless.unstacked
    assert not stacked.unstacked
    sampling = SamplingParams(max_new_tokens=20)
    prompts = [encode(prompt) for prompt in PROMPTS]
    assert [g.token_ids for g in stacked.generate(prompts, sampling)] == [
        g.token_ids for g in endless.generate(prompts, sampling)
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=7),
        SamplingParams(
            max_new_tokens=40, temperature=1.5, top_k=50, top_p=0.9, repetition_penalty=1.2, seed=3
        ),
    ],
    ids=["greedy", "temperature", "all"],
)
def test_a_row_does_not_depend_on_the_batch(generator, sampling):
    together = generator.generate(PROMPTS, sampling)
    assert together == [generator.generate(prompt, sampling)[0] for prompt in PROMPTS]
    assert together[::-1] == generator.generate(PROMPTS[::-1], sampling)
    assert together == generator.generate(PROMPTS, sampling, batch_size=2)


def test_rows_may_differ_in_their_sampling(generator):
    each = [
        SamplingParams(max_new_tokens=3),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=1),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=2, stop=("e",)),
        SamplingParams(max_new_tokens=30, temperature=1.0, top_k=3, repetition_penalty=2.0),
    ]
    together = generator.generate(["Hi"] * 4, each)
    assert together == [generator.generate("Hi", sampling)[0] for sampling in each]
    assert len({tuple(g.token_ids) for g in together}) == 4


def test_seeds_are_reproducible_and_differ(params, generator):
    def text(seed: int) -> list[int]:
        sampling = SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)
        return generator.generate("Hello", sampling)[0].token_ids

    assert text(1) == text(1) != text(2)
    again = generate(
        MODULE,
        params,
        TOKENIZER,
        "Hello",
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=1),
    )
    assert again[0].token_ids == text(1)


@pytest.mark.parametrize("prefill_block", [1, 7, 16, 512])
def test_chunked_prefill_gives_the_same_text(params, prefill_block, endless):
    chunked = Generator(MODULE, params, prefill_block=prefill_block)
    sampling = SamplingParams(max_new_tokens=12)
    prompts = [encode(prompt) for prompt in PROMPTS]
    assert chunked.generate(prompts, sampling) == endless.generate(prompts, sampling)


@pytest.mark.parametrize("unstacked", [False, True])
def test_prefill_chunks_and_single_tokens_give_equal_logits(params, unstacked):
    """To 1e-5: one block, blocks of several widths, one token at a time, and no cache at all."""
    variables = {"params": unstack_layers(params) if unstacked else params}
    tokens = jax.random.randint(jax.random.key(3), (2, 24), 0, CONFIG.vocab_size)
    whole = MODULE.apply(variables, tokens)

    @jax.jit
    def extend(cache, block):
        return MODULE.apply(variables, block, cache=cache)

    for widths in ([24], [16, 8], [5, 11, 1, 7], [1] * 24):
        cache = init_cache(CONFIG, 2, 32, unstacked=unstacked)
        parts, start = [], 0
        for width in widths:
            logits, cache = extend(cache, tokens[:, start : start + width])
            parts.append(logits)
            start += width
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


def ending_on(generator, sampling, at: int):
    """A generator whose end-of-sequence token is the token that `generator` makes at index `at`."""
    tokens = generator.generate("Hi there", sampling)[0].token_ids
    return tokens, CONFIG.replace(eos_token_id=(258, tokens[at]))


@pytest.mark.parametrize("at", [0, 5, 40])
def test_end_of_sequence_ends_the_row_at_once(generator, params, at):
    sampling = SamplingParams(max_new_tokens=60)
    tokens, config = ending_on(generator, sampling, at)
    ended = Generator(Transformer(config), params, TOKENIZER)
    [result, other] = ended.generate(["Hi there", [9, 9]], sampling)
    first = tokens.index(tokens[at])
    assert result.token_ids == tokens[: first + 1]
    assert result.finish_reason == "stop"
    assert result.text == TOKENIZER.decode(tokens[:first])  # without the ending token's
    assert other == ended.generate([9, 9], sampling)[0]


def test_the_tokenizers_eos_serves_if_the_model_has_none(generator, endless):
    assert generator.eos_token_ids == (TOKENIZER.eos_token_id,)
    assert endless.eos_token_ids == ()


def test_stop_string_across_token_borders(generator):
    """Every token is a byte, so any stop string longer than one crosses borders."""
    sampling = SamplingParams(max_new_tokens=60, temperature=0.8, top_k=20, seed=5)
    full = generator.generate("Hello", sampling)[0]
    for start, length in ((0, 2), (7, 3), (25, 4)):
        stop = full.text[start : start + length]
        cut = full.text.index(stop)
        result = generator.generate("Hello", sampling.replace(stop=(stop, "never there")))[0]
        assert result.text == full.text[:cut]
        assert result.finish_reason == "stop"
        assert result.token_ids == full.token_ids[: len(result.token_ids)]
        assert stop in TOKENIZER.decode(result.token_ids)
        assert stop not in TOKENIZER.decode(result.token_ids[:-1])


def test_the_earliest_stop_string_wins(generator):
    sampling = SamplingParams(max_new_tokens=40, temperature=0.8, top_k=20, seed=5)
    text = generator.generate("Hello", sampling)[0].text
    late, early = text[20:23], text[8:10]
    result = generator.generate("Hello", sampling.replace(stop=(late, early)))[0]
    assert result.text == text[: min(text.index(late), text.index(early))]


@pytest.mark.parametrize("stop", [(), ("zzzz",), ("e",)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_stream_joined_is_the_text(generator, stop, temperature):
    sampling = SamplingParams(max_new_tokens=50, temperature=temperature, seed=11, stop=stop)
    pieces = list(generator.stream("Once upon", sampling))
    assert "".join(pieces) == generator.generate("Once upon", sampling)[0].text
    assert all(pieces)


def test_streaming_comes_in_pieces(params, generator):
    sampling = SamplingParams(max_new_tokens=60, temperature=0.5, seed=2)
    pieces = list(stream(MODULE, params, TOKENIZER, "Once upon", sampling))
    assert len(pieces) > 5
    assert "".join(pieces) == generator.generate("Once upon", sampling)[0].text


def test_new_tokens_are_cut_to_the_context(endless):
    result = endless.generate([7] * (CONTEXT - 5), SamplingParams(max_new_tokens=50))[0]
    assert len(result.token_ids) == 5
    assert result.finish_reason == "length"


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_longer_than_the_context_is_refused(endless, length):
    with pytest.raises(PromptError, match=rf"{length} tokens .* {CONTEXT}.* at most {CONTEXT - 1}"):
        endless.generate([7] * length)


def test_unusable_prompts_are_refused(generator, endless):
    with pytest.raises(PromptError, match="empty"):
        endless.generate([[]])
    with pytest.raises(PromptError, match="token id 259"):
        endless.generate([1, 259])
    with pytest.raises(PromptError, match="needs a tokenizer"):
        endless.generate("text")
    with pytest.raises(PromptError, match="stop strings need a tokenizer"):
        endless.generate([1, 2], SamplingParams(stop=("x",)))
    with pytest.raises(PromptError, match="2 sampling parameters for 1 prompts"):
        generator.generate("a", [SamplingParams()] * 2)
    with pytest.raises(PromptError, match="at least 1"):
        generator.generate("a", batch_size=0)
    with pytest.raises(PromptError):  # at the call, before anything is iterated
        generator.stream([1, 999])


def test_an_empty_text_begins_with_bos(generator):
    sampling = SamplingParams(max_new_tokens=8)
    empty, bos = generator.generate(["", [TOKENIZER.bos_token_id]], sampling)
    assert empty == bos


def test_prompts_may_be_one_or_several(generator):
    sampling = SamplingParams(max_new_tokens=4)
    assert generator.generate([], sampling) == []
    [text] = generator.generate("ab", sampling)
    assert generator.generate(["ab", encode("ab")], sampling) == [text, text]
    assert generator.generate(encode("ab"), sampling) == [text]
    template = "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}"
    chat = Generator(MODULE, generator.params, ByteTokenizer(template))
    messages = [{"role": "user", "content": "ab"}]
    assert chat.generate(messages, sampling) == [text]
    assert chat.generate([messages, messages], sampling) == [text, text]


def test_lengths_share_compiled_functions(params):
    generator = Generator(MODULE, params)
    for length in range(1, 41):
        temperature = 0.5 + length / 40
        sampling = SamplingParams(max_new_tokens=length % 7 + 1, temperature=temperature)
        generator.generate([3] * length, sampling)
    assert generator._prefill._cache_size() <= 3  # blocks of 16, 32 and 64
    assert generator._decode._cache_size() == 1
    assert generator._first._cache_size() == 1


def test_dynamic_rotary_scaling_is_blind_to_padding():
    """Its frequencies depend on a row's length, which padding must not change."""
    config = CONFIG.replace(
        max_position_embeddings=40, rope_scaling={"type": "dynamic", "factor": 4.0}
    )
    module = Transformer(config)
    params = init_params(module, jax.random.key(2))
    # 39 tokens are padded to 64, beyond the trained 40.
    prompt = jax.random.randint(jax.random.key(1), (39,), 0, 259).tolist()
    [result] = Generator(module, params).generate(prompt, SamplingParams(max_new_tokens=1))
    logits = module.apply({"params": params}, jnp.asarray([prompt]))
    assert result.token_ids == [int(logits[0, -1].argmax())]
    from jaxlab.inference.generator import _prefill

    cache = init_cache(config, 1, 64)
    padded = jnp.asarray([prompt + [0] * 25])
    last = jnp.zeros((1, config.hidden_size))
    last, _ = _prefill(module, params, padded, jnp.asarray([39]), last, cache=cache)
    unpadded = module.apply({"params": params}, jnp.asarray([prompt]), method="hidden_states")
    np.testing.assert_allclose(last[0], unpadded[0, -1], atol=1e-5)


def test_timing_counts_tokens(generator):
    results = generator.generate(PROMPTS[:2], SamplingParams(max_new_tokens=9))
    timing = results[0].timing
    assert timing is results[1].timing
    assert timing.prompt_tokens == sum(g.prompt_length for g in results)
    assert timing.new_tokens == sum(len(g.token_ids) - 1 for g in results)
    assert timing.decode_tokens_per_second > 0
    assert timing.prefill_tokens_per_second > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_updates_the_cache_in_place(params, rows):
    """No copy of a layer's keys or values in the compiled loop: it costs more than attention."""
    generator = Generator(MODULE, params)
    prompts = [[1, 2, 3 + row] for row in range(rows)]
    settings, processors = row_settings([SamplingParams()] * batch_bucket(rows))
    padded = [*prompts, *[[0]] * (batch_bucket(rows) - rows)]
    state = generator._read(padded, np.full(len(padded), 9, np.int32), settings, processors)
    program = generator._decode.lower(
        generator.params,
        settings,
        np.int32(8),
        np.ones(len(padded), bool),
        rows=state,
        processors=processors,
    ).compile()
    shape = ",".join(map(str, state.cache.layers[0]["key"].shape))
    copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", program.as_text())
    assert not copies
