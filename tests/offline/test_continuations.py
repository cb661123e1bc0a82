import weakref

import pytest
import torch
from transformers import PreTrainedModel

from vllm_kvselect.offline.capture import Layer, capture, continue_prompt
from vllm_kvselect.offline.continuations import Continuations

NUM_ROWS, NUM_PROMPT_TOKENS = 4, 60
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def layers(llama: PreTrainedModel, token_ids: list[int]) -> list[Layer]:
    return capture(llama, token_ids)


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
    llama: PreTrainedModel, layers: list[Layer], retained: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """Each row alone, by transformers' own cache and a mask."""
    rows = zip(following.tolist(), retained, strict=True)
    return torch.stack([continue_prompt(llama, layers, *row).logits for row in rows])


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 6)], ids=str)
def test_rows_continue_as_each_does_alone(
    llama: PreTrainedModel,
    layers: list[Layer],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
    chunks: tuple[int, ...],
) -> None:
    continued = Continuations(llama, layers, retained)
    found = [continued.run(part, part.shape[1]) for part in following.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **CLOSE)


def test_nothing_holds_on_to_what_was_continued(
    llama: PreTrainedModel,
    layers: list[Layer],
    retained: torch.Tensor,
    following: torch.Tensor,
) -> None:
    continued = Continuations(llama, layers, retained)
    continued.run(following, 1)
    held = weakref.ref(continued)
    del continued
    assert held() is None


def test_only_the_last_logits_are_computed_if_asked(
    llama: PreTrainedModel,
    layers: list[Layer],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    found = Continuations(llama, layers, retained).run(following, 3)
    torch.testing.assert_close(found, expected[:, -3:], **CLOSE)


def test_rewound_rows_go_on_as_if_nothing_had_followed(
    llama: PreTrainedModel,
    layers: list[Layer],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    continued = Continuations(llama, layers, retained)
    continued.run(torch.cat((following[:, :5], following[:, :4]), dim=1), 1)
    continued.rewind(5)
    torch.testing.assert_close(continued.run(following[:, 5:], 7), expected[:, 5:], **CLOSE)


def test_rows_that_are_left_keep_their_entries_and_tokens(
    llama: PreTrainedModel,
    layers: list[Layer],
    retained: torch.Tensor,
    following: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    continued = Continuations(llama, layers, retained)
    continued.run(following[:, :5], 1)
    rows = torch.tensor([3, 1])
    continued.keep(rows)
    found = continued.run(following[rows, 5:], 7)
    torch.testing.assert_close(found, expected[rows, 5:], **CLOSE)
