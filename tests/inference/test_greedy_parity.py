"""The real SmolLM2 answers word for word as it does in transformers."""

import pytest

import jaxlab
from jaxlab.inference import SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Explain how a bicycle stays upright.",
    "Write a short poem about the sea.",
    "List three uses of a paper clip.",
    "Who wrote The Origin of Species, and when?",
]


@pytest.mark.parity
@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_transformers(count, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = jaxlab.load("smollm2-135m-instruct")
    oracle = AutoModelForCausalLM.from_pretrained(model.save(tmp_path / "smollm2"))
    generator = model.generator
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS[:count]]
    answers = generator.generate(prompts, SamplingParams(max_new_tokens=64))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([generator.encode(prompt)])
        with torch.no_grad():
            expected = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
            )
        assert answer.token_ids == expected[0, ids.shape[1] :].tolist(), prompt
