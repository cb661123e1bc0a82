import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_kvselect.config import KEYS, METHOD_NAMES, SETTINGS, ConfigError, EvictionConfig, Prefill
from vllm_kvselect.scorers import Pooling

REJECTED: list[tuple[dict[Any, Any], str, str]] = [
    ({"method": "h2"}, "method = 'h2'", "'adakv-perturb'"),
    ({"method": None}, "method = None", "'none'"),
    ({"method": "auto"}, "method = 'auto'", "only a server can choose"),
    ({"budget": 0}, "budget = 0", "at least 1"),
    ({"budget": -3}, "budget = -3", "method 'none'"),
    ({"budget": 0.0}, "budget = 0.0", "above 0.0 and up to 1.0"),
    ({"budget": 1.5}, "budget = 1.5", "write an integer"),
    ({"budget": float("nan")}, "budget = nan", "above 0.0 and up to 1.0"),
    ({"budget": "many"}, "budget = 'many'", "valid integer"),
    ({"budget": True}, "budget = True", "valid number"),
    ({"decode_budget": -1}, "decode_budget = -1", "greater than or equal to 0"),
    ({"decode_budget": 0.5}, "decode_budget = 0.5", "valid integer"),
    (
        {"method": "defensivekv", "decode_budget": 512},
        "decode_budget = 512 is not accepted with method = 'defensivekv'",
        "set it to 0, or take one of layer-probe, thetakv, layer-keydiff",
    ),
    ({"least": -1}, "least = -1", "greater than or equal to 0"),
    ({"decode_interval": 0}, "decode_interval = 0", "greater than or equal to 1"),
    ({"context": "last"}, "context = 'last'", "valid integer"),
    ({"context": "chat"}, "context = 'chat'", "with prompt_interval each turn of a chat goes on"),
    ({"check_integrity": "no"}, "check_integrity = 'no'", "valid boolean"),
    ({"window": 0}, "window = 0", "greater than or equal to 1"),
    ({"window": 32.0}, "window = 32.0", "valid integer"),
    ({"window": True}, "window = True", "valid integer"),
    ({"context": 0}, "context = 0", "greater than or equal to 1"),
    ({"context": 0.5}, "context = 0.5", "valid integer"),
    ({"kernel_size": 0}, "kernel_size = 0", "greater than or equal to 1"),
    ({"kernel_size": 6}, "kernel_size = 6", "odd"),
    ({"pooling": "min"}, "pooling = 'min'", "'max' or 'mean'"),
    ({"group_reduction": "sum"}, "group_reduction = 'sum'", "'mean' or 'max'"),
    ({"alpha": -0.1}, "alpha = -0.1", "greater than or equal to 0"),
    ({"alpha": 1.1}, "alpha = 1.1", "less than or equal to 1"),
    ({"alpha": float("nan")}, "alpha = nan", "less than or equal to 1"),
    ({"eps": -1e-9}, "eps = -1e-09", "greater than or equal to 0"),
    ({"eps": float("inf")}, "eps = inf", "finite"),
    ({"eps": float("nan")}, "eps = nan", ""),
    ({"eps": "small"}, "eps = 'small'", "valid number"),
    ({"stage_2_scores": True}, "stage_2_scores = True", "'pooled' or 'unpooled'"),
    ({"safeguard": -0.5}, "safeguard = -0.5", "greater than or equal to 0"),
    ({"safeguard": 2.0}, "safeguard = 2.0", "less than or equal to 1"),
    ({"floor": "none"}, "floor = 'none'", "'blend' or 'minimum'"),
    ({"beta": 0}, "beta = 0", "greater than or equal to 1"),
    ({"beta": 1.5}, "beta = 1.5", "valid integer"),
    ({"mass": 90}, "mass = 90", "less than or equal to 1"),
    ({"lam": -1.0}, "lam = -1.0", "greater than or equal to 0"),
    ({"lam": float("inf")}, "lam = inf", "finite"),
    ({"r_kv_lam": 1.5}, "r_kv_lam = 1.5", "less than or equal to 1"),
    ({"r_kv_threshold": -2.0}, "r_kv_threshold = -2.0", "greater than or equal to -1"),
    ({"seed": -1}, "seed = -1", "greater than or equal to 0"),
    ({"seed": 2**32}, "seed = 4294967296", "less than 4294967296"),
    ({"keep_first": -1}, "keep_first = -1", "greater than or equal to 0"),
    ({"keep_first": 1.5}, "keep_first = 1.5", "valid integer"),
    ({"future": 0}, "future = 0", "greater than or equal to 1"),
    ({"future": 0.5}, "future = 0.5", "valid integer"),
    ({"expected_eps": -0.02}, "expected_eps = -0.02", "greater than or equal to 0"),
    ({"expected_eps": float("inf")}, "expected_eps = inf", "finite"),
    ({"prefill": "sparse"}, "prefill = 'sparse'", "'dense' or 'critiprefill'"),
    ({"prefill_budget": 0}, "prefill_budget = 0", "greater than or equal to 1"),
    ({"prefill_budget": 100}, "prefill_budget = 100", "96 would be one"),
    ({"prefill_segment": 48}, "prefill_segment = 48", "32 would be one"),
    ({"prefill_block": 0}, "prefill_block = 0", "greater than or equal to 1"),
    ({"prefill_dense_until": -1}, "prefill_dense_until = -1", "greater than or equal to 0"),
    ({"prefill_dense_layers": -1}, "prefill_dense_layers = -1", "greater than or equal to 0"),
    ({"prefill_layer_fusion": 1.0}, "prefill_layer_fusion = 1.0", "less than 1"),
    ({"probe": ""}, "probe = ''", "at least 1 character"),
    ({"probe": 1}, "probe = 1", "valid string"),
    (
        {"allow_override": ["window"]},
        "allow_override = 'window'",
        "it is one of method, budget, prompt_interval, keep_first, decode_budget",
    ),
    ({"allow_override": "budget"}, "allow_override = 'budget'", "valid tuple"),
    ({"check_integrity": 1}, "check_integrity = 1", "valid boolean"),
    ({"context_store": ""}, "context_store = ''", "at least 1 character"),
    (
        {"context_store": "folder", "context_store_bytes": 0},
        "context_store_bytes = 0",
        "greater than or equal to 1",
    ),
    ({"context_store_bytes": 9}, "context_store_bytes = 9", "give context_store a folder, too"),
    ({"decode_attention": "flash"}, "decode_attention = 'flash'", "'backend' or 'xformers'"),
    (
        {"budgets": 512},
        "unknown key 'budgets'",
        "did you mean 'budget'? accepted keys: method, budget, prompt_interval",
    ),
    (
        {"method": "defensivekv", "prompt_interval": 512},
        "prompt_interval = 512 is not accepted with method = 'defensivekv'",
        "it compares a token over heads",
    ),
    (
        {"prompt_interval": 512, "prefill": "critiprefill"},
        "prompt_interval = 512 is not accepted with prefill = 'critiprefill'",
        "leave one of them out",
    ),
    ({"r_kv_lamb": 0.5}, "unknown key 'r_kv_lamb'", "did you mean 'r_kv_lam'?"),
    ({"parameters": {"alpha": 0.5}}, "unknown key 'parameters'", "accepted keys: method"),
    ({"method": "adakv-pertub"}, "method = 'adakv-pertub'", "did you mean 'adakv-perturb'?"),
    ({1: 2}, "1 = ", "strings"),
]


@pytest.mark.parametrize(("values", "named", "accepted"), REJECTED, ids=lambda part: str(part))
def test_rejection_names_the_value_and_what_is_accepted(
    values: dict[str, Any], named: str, accepted: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        EvictionConfig.parse({"method": "adakv-perturb", **values})
    assert accepted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_has_a_rejected_value() -> None:
    assert set(KEYS) <= {key for values, *_ in REJECTED for key in values}


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EvictionConfig.parse({"method": "adakv-perturb", "window": 0, "kernel_size": 4})
    assert "window = 0" in str(caught.value)
    assert "kernel_size = 4" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"budget": 1},
        {"budget": 1.0},
        {"budget": 1e-6},
        {"window": 1},
        {"kernel_size": 1},
        {"alpha": 0},
        {"alpha": 1.0},
        {"eps": 0.0},
        {"safeguard": 0.0},
        {"safeguard": 1.0},
        {"future": 1},
        {"expected_eps": 0.0},
        {"keep_first": 0},
        {"beta": 1},
        {"mass": 0.0},
        {"mass": 1},
        {"lam": 0},
        {"seed": 2**32 - 1},
    ],
    ids=str,
)
def test_bounds_are_accepted(values: dict[str, Any]) -> None:
    config = EvictionConfig.parse({"method": "adakv-perturb", **values})
    assert {key: getattr(config, key) for key in values} == values


EXPERTS_IN_REQUESTS = {"decode_interval", "keep_first"}


def test_every_setting_says_what_it_does_and_twelve_at_most_are_an_operators() -> None:
    assert tuple(SETTINGS) == KEYS
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), name
        assert setting.option is not None or not setting.operator, name
        assert setting.operator or not setting.in_requests or name in EXPERTS_IN_REQUESTS
    # `--kv-eviction-config` is the twelfth.
    assert sum(setting.operator for setting in SETTINGS.values()) == 11


def test_whole_fraction_stays_a_fraction() -> None:
    for budget in (1.0, 1):
        given = EvictionConfig.parse({"method": "adakv-perturb", "budget": budget})
        assert type(given.budget) is type(budget)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EvictionConfig(method="adakv-perturb").window = 8


def test_parameters_are_given_and_shown_flat_and_read_by_their_groups() -> None:
    values = {"method": "snapkv", "kernel_size": 3, "r_kv_lam": 0.5, "prefill_budget": 64}
    config = EvictionConfig.parse(values)
    assert config.of(Pooling).kernel_size == config.kernel_size == 3
    assert config.of(Prefill).prefill_budget == 64
    assert tuple(config.model_dump()) == KEYS
    assert values.items() <= config.model_dump().items()
    assert EvictionConfig.parse(config.model_dump()) == config
    assert hash(EvictionConfig.parse(config.model_dump())) == hash(config)


def test_every_parameter_tells_configurations_apart() -> None:
    """What names compressed contexts and sparse blocks hashes the dump."""
    for key in KEYS:
        assert key in json.loads(EvictionConfig(method="adakv-perturb").model_dump_json())
        left = json.loads(EvictionConfig(method="adakv-perturb").model_dump_json(exclude={key}))
        assert left.keys() == {*KEYS} - {key}


def test_a_copy_changes_parameters_by_their_names_alone() -> None:
    config = EvictionConfig.parse({"method": "snapkv", "kernel_size": 3})
    changed = config.model_copy(update={"kernel_size": 1, "window": 8})
    assert (changed.of(Pooling).kernel_size, changed.kernel_size, changed.window) == (1, 1, 8)
    assert changed == EvictionConfig.parse({"method": "snapkv", "kernel_size": 1, "window": 8})
    assert config.kernel_size == 3


def test_what_no_key_is_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="kernel_sizes"):
        EvictionConfig(method="adakv-perturb").kernel_sizes  # noqa: B018


def test_the_configuration_has_few_fields_of_its_own() -> None:
    assert len(EvictionConfig.model_fields) <= 24


def test_a_server_may_evict_by_default_or_where_requests_choose_the_method() -> None:
    assert EvictionConfig(method="snapkv").may_evict
    assert not EvictionConfig(method="snapkv").may_prefill_sparsely
    assert EvictionConfig.parse({"method": "none", "allow_override": ["method"]}).may_evict
    nothing = EvictionConfig.parse({"method": "none", "allow_override": ["budget"]})
    assert not nothing.may_evict
    assert not nothing.may_act


def test_a_server_may_prefill_sparsely_by_default_or_where_requests_choose_it() -> None:
    for values in ({"prefill": "critiprefill"}, {"allow_override": ["prefill"]}):
        config = EvictionConfig.parse({"method": "none", **values})
        assert config.may_prefill_sparsely
        assert config.may_act
        assert not config.may_evict


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_only_the_method_none_is_disabled(method: str) -> None:
    assert EvictionConfig.parse({"method": method}).enabled == (method != "none")


def test_file_is_read_without_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("method: none\nbudget: 0.25\n", encoding="utf-8")
    assert EvictionConfig.read_file(path) == {"method": "none", "budget": 0.25}


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4"])
def test_numbers_are_read_however_they_are_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"method: adakv-perturb\neps: {text}\n", encoding="utf-8")
    assert EvictionConfig.parse(EvictionConfig.read_file(path)).eps == 1e-4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold a mapping .* not NoneType"),
        (b"- snapkv\n", "must hold a mapping .* not list"),
        (b"method: [", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"!!python/object:os.system x", "is not valid YAML"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.yaml {message}"):
        EvictionConfig.read_file(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.yaml: No such file"):
        EvictionConfig.read_file(tmp_path / "absent.yaml")
