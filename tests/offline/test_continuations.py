import weakref
from collections.abc import Callable
from typing import NamedTuple

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


class Case(NamedTuple):
    """A prompt in a model, and what follows it in each of some rows.

    Attributes:
        model: The model.
        layers: What was captured of it.
        prompt: The prompt.
        retained: Different entries for every row, layer and head; the first row keeps all, the
            second none.
        following: Different tokens for every row.
        expected: Logits of each row alone, by transformers' own cache and a mask.
    """

    model: PreTrainedModel
    layers: list[Layer]
    prompt: list[int]
    retained: torch.Tensor
    following: torch.Tensor
    expected: torch.Tensor

    def begin(self) -> Continuations:
        """All rows, before anything follows."""
        return Continuations(self.model, self.layers, self.prompt, self.retained)


@pytest.fixture(scope="module", params=["llama", *HYBRIDS])
def case(
    request: pytest.FixtureRequest,
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    token_ids: list[int],
) -> Case:
    model = llama
    if request.param != "llama":
        torch.manual_seed(0)
        model = HYBRIDS[request.param]().eval()
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    layers, prompt = capture(model, token_ids), token_ids[:NUM_PROMPT_TOKENS]
    shape = (NUM_ROWS, len(layers), len(layers[0].key), NUM_PROMPT_TOKENS)
    retained = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    retained[0], retained[1] = True, False
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(1, max(token_ids), (NUM_ROWS, 12), generator=generator)
    rows = zip(following.tolist(), retained, strict=True)
    alone = [continue_prompt(model, layers, prompt, *row).logits for row in rows]
    return Case(model, layers, prompt, retained, following, torch.stack(alone))


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 6)], ids=str)
def test_rows_continue_as_each_does_alone(case: Case, chunks: tuple[int, ...]) -> None:
    continued = case.begin()
    found = [continued.run(part, part.shape[1]) for part in case.following.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), case.expected, **CLOSE)


def test_nothing_holds_on_to_what_was_continued(case: Case) -> None:
    continued = case.begin()
    continued.run(case.following, 1)
    held = weakref.ref(continued)
    del continued
    assert held() is None


def test_only_the_last_logits_are_computed_if_asked(case: Case) -> None:
    found = case.begin().run(case.following, 3)
    torch.testing.assert_close(found, case.expected[:, -3:], **CLOSE)


def test_rewound_rows_go_on_as_if_nothing_had_followed(case: Case) -> None:
    continued, following = case.begin(), case.following
    continued.run(torch.cat((following[:, :5], following[:, :4]), dim=1), 1)
    continued.rewind(5)
    torch.testing.assert_close(continued.run(following[:, 5:], 7), case.expected[:, 5:], **CLOSE)


def test_rows_that_are_left_keep_their_entries_and_tokens(case: Case) -> None:
    continued, rows = case.begin(), torch.tensor([3, 1])
    continued.run(case.following[:, :5], 1)
    continued.keep(rows)
    found = continued.run(case.following[rows, 5:], 7)
    torch.testing.assert_close(found, case.expected[rows, 5:], **CLOSE)
