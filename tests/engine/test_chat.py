"""A conversation that sends its growing history again with every turn."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.conftest import SHALLOW_LAYERS, Engine, EngineFactory
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.tiny_model import shallow_copy, tiny_model

EVICTION = {"method": "layer-probe", "budget": 128}
WITH_TOKENIZER = {"skip_tokenizer_init": False}
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


class Talk(NamedTuple):
    """A conversation.

    Attributes:
        prompts: Token ids of each turn: all turns before it, and the question.
        answers: Their answers.
        hits: Tokens of each prompt that came from the prefix cache.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    hits: list[int]


@pytest.fixture
def shallow_model(tmp_path: Path) -> Path:
    """With all tokens: what is said becomes tokens here."""
    return shallow_copy(tiny_model(), SHALLOW_LAYERS, tmp_path / "model")


def talk(engine: Engine, document: list[int], max_tokens: int) -> Talk:
    """Asks all questions about a document in the system prompt."""
    tokenizer = engine.llm.get_tokenizer()
    history = [{"role": "system", "content": tokenizer.decode(document)}]
    had = Talk([], [], [])
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        chat = tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
        had.prompts.append(tokenizer.encode(chat, add_special_tokens=False))
        (result,) = engine.results([had.prompts[-1]], max_tokens=max_tokens)
        had.hits.append(result.num_cached_tokens)
        had.answers.append(list(result.outputs[0].token_ids))
        history.append({"role": "assistant", "content": tokenizer.decode(had.answers[-1])})
    return had


def test_ten_turns_hit_the_prefix_cache_and_answer_as_a_fresh_server(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    with start_engine(EVICTION, 200, **WITH_TOKENIZER) as engine:
        prompts, answers, hits = talk(engine, text_tokens[:300], max_tokens=8)
    # The next turn finds all full blocks of each prompt, as far as it may.
    settings = EvictionConfig(**EVICTION)
    most = [cuts(len(prompt), 32, settings).most_found(32, settings.window) for prompt in prompts]
    full = [len(prompt) // 32 * 32 for prompt in prompts]
    assert hits == [0, *map(min, full, most[1:])]
    assert hits[-1] > hits[1] + 5 * 32
    with start_engine(EVICTION, 200, enable_prefix_caching=False) as engine:
        assert [engine.outputs([each], max_tokens=8)[0].token_ids for each in prompts] == answers


CHATTING = {"method": "layer-keydiff", "budget": 256, "prompt_interval": 128}


def test_ten_turns_over_a_document_compute_it_once_and_answer_as_a_fresh_server(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    with start_engine(CHATTING, 200, **WITH_TOKENIZER) as engine:
        prompts, answers, hits = talk(engine, text_tokens[:1000], max_tokens=40)
    # At least the last state that the turn before has left of what both begin with.
    same = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), len(a))
        for a, b in pairwise(prompts)
    ]
    assert hits[0] == 0
    assert all(hit >= (shared - 1) // 128 * 128 for hit, shared in zip(hits[1:], same, strict=True))
    assert min(hits[1:]) > 900
    with start_engine(CHATTING, 200, enable_prefix_caching=False, **WITH_TOKENIZER) as engine:
        assert [engine.outputs([each], max_tokens=40)[0].token_ids for each in prompts] == answers
