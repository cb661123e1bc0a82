import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as interleaved_reference
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vllm_kvselect.scoring.rotation import Rotation

NUM_TOKENS, NUM_HEADS, HEAD_SIZE = 20, 3, 8


def tables(stretch: float = 1.0, size: int = HEAD_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(64, dtype=torch.float64)[:, None] * frequencies
    return stretch * angles.cos(), stretch * angles.sin()


def drawn() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_HEADS, NUM_TOKENS, HEAD_SIZE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("stretch", [1.0, 1.3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [HEAD_SIZE, 4])
@pytest.mark.parametrize("first", [0, 17])
def test_undo_is_the_inverse(size: int, interleaved: bool, stretch: float, first: int) -> None:
    rotation = Rotation(*tables(stretch, size), interleaved)
    vectors = drawn()
    rotated = rotation.apply(vectors, first)
    assert not torch.allclose(rotated[:, 1:], vectors[:, 1:], atol=0.1)
    torch.testing.assert_close(rotation.undo(rotated, first), vectors)


def test_apply_rotates_as_llama_does() -> None:
    embedding = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4))
    positions = torch.arange(5, 5 + NUM_TOKENS)[None]
    vectors = drawn().float()
    expected, _ = apply_rotary_pos_emb(vectors[None], vectors[None], *embedding(vectors, positions))
    cos, sin = (table.float() for table in tables())
    torch.testing.assert_close(Rotation(cos, sin).apply(vectors, 5), expected[0])


def test_apply_rotates_neighbours_as_gptj_does() -> None:
    cos, sin = tables()
    vectors = drawn()
    by_token = vectors.transpose(0, 1)[None]
    expected = interleaved_reference(by_token, sin[None, :NUM_TOKENS], cos[None, :NUM_TOKENS])
    found = Rotation(cos, sin, interleaved=True).apply(vectors)
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_mean_is_the_mean_of_what_each_position_gives(interleaved: bool) -> None:
    rotation = Rotation(*tables(1.3, 4), interleaved)
    vectors = drawn()[:, :1]
    each = [rotation.apply(vectors, position) for position in range(11, 20)]
    mean = rotation.mean(11, 9).apply(vectors.expand(-1, 5, -1))
    torch.testing.assert_close(mean, torch.stack(each).mean(0).expand(-1, 5, -1))


def test_mean_leaves_out_positions_that_the_model_does_not_have() -> None:
    rotation, vectors = Rotation(*tables()), drawn()[:, :1]
    expected = rotation.mean(60, 4).apply(vectors)
    torch.testing.assert_close(rotation.mean(60, 512).apply(vectors), expected)
    last = rotation.apply(vectors, 63)
    for beyond in (63, 64, 100):
        torch.testing.assert_close(rotation.mean(beyond, 512).apply(vectors), last)


def test_tables_of_low_precision_give_float32() -> None:
    cos, sin = (table.bfloat16() for table in tables())
    rotation, vectors = Rotation(cos, sin), drawn().bfloat16()
    exact = Rotation(cos.double(), sin.double())
    for method in ("apply", "undo"):
        found = getattr(rotation, method)(vectors, 3)
        assert found.dtype == torch.float32
        expected = getattr(exact, method)(vectors.double(), 3)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_attention_depend_on_the_distance_alone() -> None:
    rotation = Rotation(*tables())
    query, key = drawn()[0, :1], drawn()[1, :1]
    near = rotation.apply(query, 9) @ rotation.apply(key, 4).T
    far = rotation.apply(query, 35) @ rotation.apply(key, 30).T
    torch.testing.assert_close(near, far)
