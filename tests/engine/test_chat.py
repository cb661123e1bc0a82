"""A conversation that sends its growing history again with every turn."""

import pytest
from transformers import AutoTokenizer

from tests.engine.conftest import EngineFactory
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import cuts
from vllm_kvselect.tiny_model import tiny_model

pytestmark = pytest.mark.engine
EVICTION = {"method": "adakv-perturb", "budget": 128}
QUESTIONS = [
    "What is this about?",
    "Who wrote it?",
    "Name three things that it mentions.",
    "Why?",
    "Say the same in one sentence.",
    "What does the second word mean?",
    "Is that all?",
    "What would you change?",
    "Repeat what I asked you first.",
    "Thank you. What did we talk about?",
]


def test_ten_turns_hit_the_prefix_cache_and_answer_as_a_fresh_server(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model()))
    history = [{"role": "system", "content": tokenizer.decode(text_tokens[:300])}]
    prompts, answers, hits = [], [], []
    with start_engine(EVICTION, 200) as engine:
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            chat = tokenizer.apply_chat_template(
                history, add_generation_prompt=True, tokenize=False
            )
            prompts.append(tokenizer.encode(chat, add_special_tokens=False))
            (result,) = engine.results([prompts[-1]], max_tokens=8)
            hits.append(result.num_cached_tokens)
            answers.append(list(result.outputs[0].token_ids))
            history.append({"role": "assistant", "content": tokenizer.decode(answers[-1])})
    # Of each prompt, the blocks before the packed ones were hashed, and the next turn finds them.
    first_packed = [
        cuts(len(prompt), 32, EvictionConfig(**EVICTION)).first_private for prompt in prompts
    ]
    assert hits == [0, *(32 * num_blocks for num_blocks in first_packed[:-1])]
    assert first_packed == sorted(first_packed)
    assert first_packed[-1] > first_packed[0] + 5
    with start_engine(EVICTION, 200, enable_prefix_caching=False) as engine:
        for prompt, answer in zip(prompts, answers, strict=True):
            (fresh,) = engine.outputs([prompt], max_tokens=8)
            assert list(fresh.token_ids) == answer
