from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.strategies import Shape, frequencies, random_layer, random_probe, rotation
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring import probe
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.probe import num_features, probe_features, probe_scores

SHAPE = Shape(2, 3, 8, 8, 3, 51, 2)
LAYER = random_layer(SHAPE, 0)
NUM_TOKENS = SHAPE.num_prompt_tokens
CONFIG = EvictionConfig(method="probe", window=SHAPE.window)


def inputs(**changes: object) -> ScoringInputs:
    whole = (LAYER.query[:0], LAYER.key, LAYER.value, SHAPE.scale)  # no query is read
    given = ScoringInputs(*whole, rotation=rotation(SHAPE.head_size), probe=LAYER.probe)
    return replace(given, **changes)


def expected() -> torch.Tensor:
    tensors = LAYER.key, LAYER.value, LAYER.probe
    scores = oracle.probe_scores(
        *(tensor.tolist() for tensor in tensors), frequencies(SHAPE.head_size), SHAPE.window
    )
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 7 * num_features(8) * 2, 2**20])
def test_scores_equal_the_oracle_in_blocks_of_any_size(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_BLOCK_ELEMENTS", block)
    torch.testing.assert_close(probe_scores(inputs(), CONFIG), expected())


def test_features_are_the_heads_own_vectors_before_rotation() -> None:
    features = probe_features(inputs())
    assert features.shape == (2, NUM_TOKENS, num_features(8))
    turn = rotation(SHAPE.head_size)
    for head in range(2):
        for token in (0, 5, NUM_TOKENS - 1):
            before = turn.undo(LAYER.key[head, token][None], token)[0]
            expected_features = torch.cat((before, LAYER.value[head, token], torch.ones(1)))
            torch.testing.assert_close(features[head, token], expected_features)


def test_a_token_is_scored_alike_at_every_position() -> None:
    turn = rotation(SHAPE.head_size)
    moved = inputs(key=turn.apply(turn.undo(LAYER.key), 40))
    far, near = probe_features(moved, first_position=40), probe_features(inputs())
    torch.testing.assert_close(far, near)


def test_of_equal_tokens_the_later_one_is_above_whatever_rounding_does() -> None:
    """As in the first layer, where vectors before the rotation follow from the token alone."""
    turn, generator = rotation(64, 4096), torch.Generator().manual_seed(0)
    one = [torch.randn(1, 1, 64, generator=generator) for _ in range(2)]
    key, value = (part.expand(-1, 4096, -1) for part in one)
    same = ScoringInputs(
        key.transpose(0, 1)[:0],
        turn.apply(key).float(),
        value,
        1.0,
        rotation=turn,
        probe=random_probe(1, 64, seed=0),
    )
    scores = probe_scores(same, CONFIG)[0, 2:]
    assert (scores[16:] > scores[:-16]).all()


def test_a_model_that_does_not_rotate_is_read_as_it_is() -> None:
    features = probe_features(inputs(rotation=None))
    torch.testing.assert_close(features[1, 3, :8], LAYER.key[1, 3])


def test_half_precision_is_scored_in_float32() -> None:
    half = {
        name: getattr(inputs(), name).bfloat16().float().bfloat16() for name in ("key", "value")
    }
    scores = probe_scores(inputs(**half), CONFIG)
    assert scores.dtype == torch.float32
    wide = {name: tensor.double() for name, tensor in half.items()}
    torch.testing.assert_close(
        scores.double(), probe_scores(inputs(**wide), CONFIG), rtol=1e-4, atol=0
    )


def test_a_token_is_scored_when_it_first_competes_and_keeps_its_score() -> None:
    """At a cut some entries come with numbers, whatever their columns say of them by now."""
    first, everything = inputs(value=LAYER.value[:, :16]), probe_scores(inputs(), CONFIG)
    numbers = probe_scores(first, CONFIG)[:, 4:]
    torch.testing.assert_close(numbers, everything[:, 4:16])
    later = inputs(
        key=torch.cat((torch.full_like(LAYER.key[:, 4:16], torch.nan), LAYER.key[:, 16:]), dim=1),
        value=LAYER.value[:, 4:],
        numbers=numbers,
        first_position=16,
    )
    torch.testing.assert_close(probe_scores(later, CONFIG), everything[:, 4:])
