"""Rotations are bound to layers by what their attention modules do, or refused with the reason."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Exaone4Config, Glm4Config, Phi3Config
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.conftest import EngineFactory
from tests.engine.random_models import random_llama, random_prompts, with_positions_of_several_parts
from tests.engine.test_unreadable_projections import CHOOSING, PROMPT, SIZES, offered, params
from tests.probe_files import probe_of
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.bind.rotation import _rotation, _UnknownError
from vllm_kvselect.engine.frontend.requests import RequestRefusedError, check_request
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.rotation import Rotation

REFUSED = "methods that need queries as they were before their positions cannot be used with "
NUM_HEADS, HEAD_SIZE, LENGTH = 2, 8, 40
MODEL_CONFIG: Any = SimpleNamespace(
    max_model_len=LENGTH,
    dtype=torch.float32,
    uses_mrope=False,
    get_hidden_size=lambda: NUM_HEADS * HEAD_SIZE,
)


class Rotary(nn.Module):
    """vLLM's table, and what is done with it."""

    def __init__(self, num_positions: int = LENGTH, interleaved: bool = False) -> None:
        super().__init__()
        angles = torch.arange(num_positions)[:, None] * 10.0 ** -torch.arange(3)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.is_neox_style = not interleaved

    def rotated(self, positions: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache.chunk(2, dim=-1)
        rotation = Rotation(cos, sin, interleaved=not self.is_neox_style)
        by_head = vectors.view(len(positions), NUM_HEADS, 1, HEAD_SIZE)
        each = zip(by_head, positions.tolist(), strict=True)
        return torch.stack([rotation.apply(v, p) for v, p in each]).view_as(vectors)


class Module(nn.Module):
    """An attention module."""

    def __init__(self, rotary: Rotary | None, is_applied: bool = True) -> None:
        super().__init__()
        self.attn = nn.Identity()
        self.attn.head_size = HEAD_SIZE
        self.rotary_emb, self.is_applied = rotary, is_applied

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key = hidden_states.clone(), -hidden_states
        if self.rotary_emb is not None and self.is_applied:
            query, key = (self.rotary_emb.rotated(positions, each) for each in (query, key))
        return self.attn(*self.changed(positions, query, key), hidden_states)

    def changed(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def bound(module: Module) -> Rotation | None:
    attention: Any = module.attn
    return _rotation(module, attention, MODEL_CONFIG, torch.device("cpu"))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_table_that_is_used_is_found_and_not_copied(interleaved: bool) -> None:
    rotary = Rotary(interleaved=interleaved)
    rotation = bound(Module(rotary))
    assert rotation is not None
    assert rotation.interleaved is interleaved
    assert rotation.cos.shape == rotation.sin.shape == (LENGTH, 3)
    assert rotation.cos.data_ptr() == rotary.cos_sin_cache.data_ptr()


@pytest.mark.parametrize("rotary", [None, Rotary()], ids=["no module", "a module that is not used"])
def test_layers_that_do_not_rotate_have_no_rotation(rotary: Rotary | None) -> None:
    assert bound(Module(rotary, is_applied=False)) is None


class Cooled(Module):
    """Late queries are larger, as Llama 4's are where it does not rotate."""

    def changed(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query * (1 + (positions > LENGTH - 5))[:, None], key


class KeysOfTheirOwn(Module):
    """Keys are rotated by other angles than queries."""

    def changed(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, Rotary(interleaved=True).rotated(positions, key)


class Broken(Module):
    """Cannot be run alone."""

    def changed(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError("forward context")


class Asking(Module):
    """Wants more than positions and hidden states."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, rope: Any) -> Any:
        return self.attn(hidden_states, hidden_states, hidden_states)


class Idle(Module):
    """Does not call its attention layer."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


ANOTHER_WAY = "depend on positions in another way"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Cooled(Rotary()), ANOTHER_WAY),
        (Cooled(None), ANOTHER_WAY),
        (KeysOfTheirOwn(Rotary(), is_applied=False), ANOTHER_WAY),
        (Module(Rotary(LENGTH - 1)), ANOTHER_WAY),
        (Broken(Rotary()), "Broken cannot be run alone, so that it cannot be tried how it .*$"),
        (Asking(Rotary()), "Asking wants more than positions and hidden states"),
        (Idle(Rotary()), "Idle does not call its attention layer"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_cannot_be_told_is_refused(module: Module, reason: str) -> None:
    # The shortest table lacks the last position, where vLLM reads beyond its end.
    if isinstance(module.rotary_emb, Rotary) and len(module.rotary_emb.cos_sin_cache) < LENGTH:
        module.rotary_emb.rotated = Rotary().rotated  # type: ignore[method-assign]
    with pytest.raises(_UnknownError, match=reason):
        bound(module)


class Adapted(nn.Module):
    """A linear layer with adapters, whose state only a running engine sets."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Identity()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise IndexError("no adapters yet")


class WithAdapters(Module):
    """A module of adapted linear layers."""

    def __init__(self, rotary: Rotary | None) -> None:
        super().__init__(rotary)
        self.qkv_proj = Adapted()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(positions, self.qkv_proj(hidden_states))


def test_adapters_are_taken_off_for_the_trial() -> None:
    module = WithAdapters(Rotary())
    assert isinstance(bound(module), Rotation)
    with pytest.raises(IndexError):
        module.qkv_proj(torch.ones(1))


def test_text_with_positions_of_several_parts_is_as_with_one(
    start_small: EngineFactory, tmp_path: Path
) -> None:
    method = "layer-probe"
    folder = random_llama(tmp_path / "model", num_layers=2)
    settings = {**CHOOSING, "method": method, "probe": str(probe_of(folder))}
    answers = []
    for make, has_parts in ((Path, False), (with_positions_of_several_parts, True)):
        with start_small(settings, model=make(folder), language_model_only=has_parts) as engine:
            answers.append(engine.generate(random_prompts([400, 300]), 8))
            if has_parts:
                refuses_images(engine.llm.llm_engine, method)
    assert answers[0] == answers[1]


def refuses_images(engine: LLMEngine, method: str) -> None:
    """As a client gives them, and as vLLM's front end prepares them; other methods take them."""
    assert engine.model_config.uses_mrope
    given = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": object()}}
    prepared = {"type": "multimodal", "prompt_token_ids": [1, 2], "mm_placeholders": {"image": [0]}}
    for prompt in (given, prepared):
        refusal = f"eviction method '{method}' takes text alone of this model: .*M-RoPE.*one of "
        with pytest.raises(RequestRefusedError, match=refusal) as caught:
            engine.add_request("images", prompt, params(None))
        assert method not in str(caught.value).partition("choose one of ")[2]
        check_request(engine, prompt, params("snapkv"))


def test_tables_of_the_real_model_are_its_angles(start_engine: EngineFactory) -> None:
    with start_engine({"method": "layer-probe"}, 80) as engine:
        rotations = [impl.rotation for impl in engine.impls]
    angles = 100_000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    turns = torch.arange(2048, dtype=torch.float64)[:, None] * angles
    for rotation in rotations:
        assert not rotation.interleaved
        for table, expected in ((rotation.cos, turns.cos()), (rotation.sin, turns.sin())):
            torch.testing.assert_close(table[:2048].double(), expected, rtol=0, atol=2e-4)


def test_layers_with_adapters_are_bound(start_engine: EngineFactory) -> None:
    with start_engine({"method": "layer-probe"}, 80, enable_lora=True) as engine:
        assert all(isinstance(impl.rotation, Rotation) for impl in engine.impls)


def test_methods_that_do_not_need_rotations_bind_nothing(start_engine: EngineFactory) -> None:
    with start_engine({"method": "keydiff"}, 80) as engine:
        assert all(impl.rotation is None for impl in engine.impls)


KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "architecture", "rotates"),
    [
        # Half of the channels, in pairs of neighbours.
        (Glm4Config(**SIZES), "Glm4ForCausalLM", ((512, 8), True)),
        # Full attention does not rotate, and has a rotary embedding.
        (Exaone4Config(**SIZES, **KINDS), "Exaone4ForCausalLM", None),
        # The table for long contexts stands behind that for short ones.
        (
            Phi3Config(**SIZES, original_max_position_embeddings=128, rope_parameters=LONG),
            "Phi3ForCausalLM",
            ((512, 16), False),
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_models_of_other_kinds(
    start_small: EngineFactory, config: Any, architecture: str, rotates: Any, tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    choosing = {**CHOOSING, "method": "adakv"}
    with start_small(choosing, model=tmp_path, load_format="dummy") as engine:
        (rotation, *_) = [impl.rotation for impl in engine.impls if impl.sliding_window == -1]
        if rotates is None:
            assert rotation is None
        else:
            assert (rotation.cos.shape, rotation.interleaved) == rotates
        assert len(engine.outputs([PROMPT], 4)[0].token_ids) == 4


def test_a_model_whose_rotation_cannot_be_told_serves_other_methods(
    start_small: EngineFactory, persimmon: Path
) -> None:
    reason, probing = rf"{REFUSED}Transformers.*PersimmonAttention", {"method": "layer-probe"}
    with pytest.raises(ConfigError, match=reason), start_small(probing, model=persimmon):
        pass
    with start_small({**CHOOSING, "method": "adakv"}, model=persimmon) as engine:
        (answer,) = engine.outputs([PROMPT], 4, [{"kv_eviction": "keydiff"}])
        assert len(answer.token_ids) == 4
        with pytest.raises(RequestRefusedError, match=REFUSED) as caught:
            engine.outputs([PROMPT], 4, [{"kv_eviction": "layer-probe"}])
        without = {name for name in METHODS if "rotation" not in METHODS[name].needs}
        assert offered(caught) == without
