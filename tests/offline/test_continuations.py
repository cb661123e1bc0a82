import weakref
from collections.abc import Callable

import pytest
import torch
from papers.continuation import continue_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.engine.random_hybrids import falcon_h1, lfm2, qwen3_next
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.continuations import Continuations

NUM_ROWS, NUM_PROMPT_TOKENS = 4, 60
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "lfm2": lfm2,
    "falcon_h1": falcon_h1,
    "qwen3_next": qwen3_next,
}


@pytest.fixture(scope="module", params=["llama", *HYBRIDS])
def model(
    request: pytest.FixtureRequest, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    if request.param == "llama":
        return llama
    torch.manual_seed(0)
    hybrid = HYBRIDS[request.param]().eval()
    hybrid.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return hybrid


@pytest.fixture(scope="module")
def layers(model: PreTrainedModel, token_ids: list[int]) -> list[Layer]:
    return capture(model, token_ids)


@pytest.fixture(scope="module")
def prompt(token_ids: list[int]) -> list[int]:
    return token_ids[:NUM_PROMPT_TOKENS]


@pytest.fixture(scope="module")
def retained(layers: list[Layer]) -> torch.Tensor:
    """Different entries for every row, layer and head; the first row keeps all, the second none."""
    shape = (NUM_ROWS, len(layers), len(layers[0].key), NUM_PROMPT_TOKENS)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    drawn[0], drawn[1] = True, False
    return drawn


@pytest.fixture(scope="module")
def following(token_ids: list[int]) -> torch.Tensor:
    """Different tokens for every row."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, max(token_ids), (NUM_ROWS, 12), generator=generator)


@pytest.fixture(scope="module")
def expected(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
) -> torch.Tensor:
    """Each row alone, by transformers' own cache and a mask."""
    rows = zip(following.tolist(), retained, strict=True)
    return torch.stack([continue_prompt(model, layers, prompt, *row).logits for row in rows])


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 6)], ids=str)
def test_rows_continue_as_each_does_alone(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
    chunks: tuple[int, ...],
) -> None:
    continued = Continuations(model, layers, prompt, retained)
    found = [continued.run(part, part.shape[1]) for part in following.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)


def test_nothing_holds_on_to_what_was_continued(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
) -> None:
    continued = Continuations(model, layers, prompt, retained)
    continued.run(following, 1)
    held = weakref.ref(continued)
    del continued
    assert held() is None


def test_only_the_last_logits_are_computed_if_asked(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    found = Continuations(model, layers, prompt, retained).run(following, 3)
    torch.testing.assert_close(found, expected[:, -3:], **CLOSE)


def test_rewound_rows_go_on_as_if_nothing_had_followed(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    continued = Continuations(model, layers, prompt, retained)
    continued.run(torch.cat((following[:, :5], following[:, :4]), dim=1), 1)
    continued.rewind(5)
    torch.testing.assert_close(continued.run(following[:, 5:], 7), expected[:, 5:], **CLOSE)


def test_rows_that_are_left_keep_their_entries_and_tokens(
    model: PreTrainedModel,
    layers: list[Layer],
    prompt: list[int],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    continued = Continuations(model, layers, prompt, retained)
    continued.run(following[:, :5], 1)
    rows = torch.tensor([3, 1])
    continued.keep(rows)
    found = continued.run(following[rows, 5:], 7)
    torch.testing.assert_close(found, expected[rows, 5:], **CLOSE)
