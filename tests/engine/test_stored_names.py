"""Contexts have one name in a folder where one may be read for the other, and else another."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.engine.states.stored_names import adapter_digest, stored_name
from vllm_kvselect.planning.plan import plan

SERVER = EvictionConfig(
    method="layer-probe",
    budget=0.25,
    context=128,
    allow_override=("method", "budget", "context"),
    context_store="folder",
)
TOKENS = [*range(100, 300)]
IDENTITY = StoreIdentity("server", 1)


def name(
    tokens: list[int] = TOKENS,
    server: EvictionConfig = SERVER,
    identity: StoreIdentity = IDENTITY,
    extra_args: dict[str, Any] | None = None,
    block_size: int = 16,
    **request: Any,
) -> str | None:
    params = SamplingParams(max_tokens=9, extra_args=extra_args)
    made = Request("r", tokens, params, None, **request)
    planned = plan(server, params, made.prompt_token_ids, len(tokens), block_size)
    return stored_name(made, planned, identity)


def adapter(folder: Path, weights: bytes, number: int = 1, **values: Any) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest("adapter", number, str(folder), **values)


def test_what_follows_the_context_has_no_part_in_its_name() -> None:
    assert name() == name([*TOKENS[:128], *range(900, 950)])
    assert len(name() or "") == 64


def test_folder_bound_and_checks_have_no_part_in_it() -> None:
    changes = {"context_store": "other", "context_store_bytes": 9, "check_integrity": True}
    # Where the probe lies neither: the identity knows what is in it.
    assert name(server=SERVER.model_copy(update={**changes, "probe": "file"})) == name()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [*TOKENS[:127], 7, *TOKENS[128:]]},
        {"tokens": [7, *TOKENS[1:]]},
        {"cache_salt": "tenant"},
        {"cache_salt": "another"},
        {"identity": StoreIdentity("other", 1)},
        {"extra_args": {"kv_eviction": "layer-keydiff"}},
        {"extra_args": {"kv_eviction_budget": 0.5}},
        {"extra_args": {"kv_eviction_context": 96}},
        {"server": SERVER.model_copy(update={"keep_first": 5})},
        {"server": SERVER.model_copy(update={"window": 16})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_all_that_decides_what_is_retained_and_for_whom_is_part_of_it(
    change: dict[str, Any],
) -> None:
    names = {name(), name(cache_salt="tenants"), name(**change)}
    assert len(names) == 3


def test_the_files_of_an_adapter_are_part_of_it_and_its_name_is_not(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", b"weights", 1), adapter(tmp_path / "two", b"others", 2)
    copy = adapter(tmp_path / "copy", b"weights", 3)
    names = [name(lora_request=lora) for lora in (None, one, two, copy)]
    assert names[1] == names[3]
    assert len({*names}) == 3


def test_what_cannot_be_known_is_not_stored(tmp_path: Path) -> None:
    assert adapter_digest(LoRARequest("a", 1, "of/the-hub")) is None
    assert adapter_digest(adapter(tmp_path / "a", b"", load_inplace=True)) is None
    assert name(lora_request=LoRARequest("a", 1, "of/the-hub")) is None
