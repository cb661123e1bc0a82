from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvselect.config import METHOD_NAMES, OVERRIDE_NAMES, ConfigError, EvictionConfig, Prefill
from vllm_kvselect.registry import METHODS
from vllm_kvselect.request import (
    FULL_CACHE,
    MAX_KEYS,
    REFUSAL_REASONS,
    REQUEST_KEYS,
    RequestError,
    Sampling,
    planned_config,
    refuse_beam_settings,
    refuse_stray_settings,
    request_config,
)

many = settings(max_examples=300, deadline=None, derandomize=True)
SERVER = EvictionConfig(method="adakv-perturb", budget=512, window=16, allow_override=())
OPEN = EvictionConfig(
    method="adakv-perturb", budget=512, window=16, allow_override=("method", "budget")
)

budgets = st.one_of(st.integers(1, 5000), st.floats(0.001, 1.0))
servers = st.builds(
    EvictionConfig,
    method=st.sampled_from(METHOD_NAMES),
    budget=budgets,
    window=st.integers(1, 64),
    allow_override=st.lists(st.sampled_from(OVERRIDE_NAMES), unique=True).map(tuple),
)
asked = st.fixed_dictionaries(
    {},
    optional={
        "kv_eviction": st.sampled_from(METHOD_NAMES),
        "kv_eviction_budget": budgets,
        "kv_eviction_context": st.integers(1, 5000),
    },
)
others = st.dictionaries(st.sampled_from(["session_id", "kv_transfer_params", "x"]), st.integers())
anything = st.dictionaries(
    st.sampled_from(["kv_eviction", "kv_eviction_budget", "kv_eviction_window", "other"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(budgets)),
)


def sampling(
    extra_args: dict[str, Any] | None,
    max_tokens: int | None = None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    return SimpleNamespace(
        extra_args=extra_args, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs
    )


def cut_in_prompts(server: EvictionConfig, own: dict[str, Any], interval: int) -> EvictionConfig:
    """The server with an interval, if all methods that are named allow that."""
    named = METHODS.keys() & {server.method, *map(str, own.values())}
    able = all(METHODS[name].in_rounds for name in named)
    return server.model_copy(update={"prompt_interval": interval}) if able else server


@pytest.mark.parametrize(
    ("budget", "is_accepted"), [(24, True), (48, True), (32, True), (20, False)]
)
def test_a_prefill_budget_counts_in_the_servers_own_blocks(budget: int, is_accepted: bool) -> None:
    sizes = {"prefill_block": 8, "prefill_segment": 24, "prefill_budget": 16}
    sparse = {"method": "none", "prefill": "critiprefill"}
    given = {**sparse, **sizes, "allow_override": ("prefill_budget",)}
    server = EvictionConfig.parse(given)
    if is_accepted:
        config = request_config(server, {"kv_prefill_budget": budget})
        assert config.of(Prefill).prefill_budget == budget
    else:
        with pytest.raises(RequestError, match=r"prefill_block = 8: .* 16 would be one"):
            request_config(server, {"kv_prefill_budget": budget})


def is_change(server: EvictionConfig, field: str, value: Any) -> bool:
    """1 and 1.0 are different budgets."""
    return repr(getattr(server, field)) != repr(value)


@many
@given(servers, asked, others)
def test_the_request_changes_what_it_names_and_nothing_else(
    server: EvictionConfig, own: dict[str, Any], other: dict[str, Any]
) -> None:
    changes = {REQUEST_KEYS[key]: value for key, value in own.items()}
    refused = [
        field
        for field, value in changes.items()
        if is_change(server, field, value) and field not in server.allow_override
    ]
    if refused:
        with pytest.raises(RequestError, match="is not allowed") as caught:
            request_config(server, other | own)
        assert caught.value.reason == "not_allowed"
        assert REQUEST_KEYS[caught.value.key] in refused
        assert planned_config(server, sampling(other | own)).method == "none"
        return
    config = request_config(server, other | own)
    assert repr(config) == repr(EvictionConfig.parse(server.model_dump() | changes))
    assert repr(planned_config(server, sampling(other | own))) == repr(config)


@many
@given(servers, anything)
def test_whatever_is_sent_is_honoured_or_refused_with_a_reason(
    server: EvictionConfig, extra_args: dict[str, Any]
) -> None:
    refusal = None
    config = EvictionConfig.parse(server.model_dump() | {"method": "none"})
    try:
        config = request_config(server, extra_args)
    except RequestError as error:
        refusal = error
    assert planned_config(server, sampling(extra_args)) == config
    if refusal is not None:
        assert refusal.key in extra_args
        assert refusal.key in str(refusal)
        assert refusal.reason in REFUSAL_REASONS


@pytest.mark.parametrize("extra_args", [None, {}, {"session_id": "a"}])
def test_without_settings_the_request_has_the_servers(extra_args: Any) -> None:
    assert request_config(SERVER, extra_args) is SERVER


def test_what_equals_the_default_is_no_change() -> None:
    own = {"kv_eviction": "adakv-perturb", "kv_eviction_budget": 512}
    assert request_config(SERVER, own) == SERVER


def test_auto_is_the_servers_own_method() -> None:
    """What `auto` stood for was chosen when the server started."""
    assert request_config(SERVER, {"kv_eviction": "auto"}) == SERVER
    probing = EvictionConfig.parse({"method": "layer-probe", "allow_override": ["budget"]})
    config = request_config(probing, {"kv_eviction": "auto", "kv_eviction_budget": 64})
    assert (config.method, config.budget) == ("layer-probe", 64)


@pytest.mark.parametrize(
    ("server", "own", "interval"),
    [
        ("layer-probe", {}, 512),
        ("layer-probe", {"kv_eviction": "layer-probe"}, 512),
        ("layer-probe", {"kv_eviction": "keydiff"}, 512),
        ("layer-probe", {"kv_eviction": "snapkv"}, 0),
        ("layer-probe", {"kv_eviction": "defensivekv"}, 0),  # it could not
        ("layer-probe", {"kv_eviction": "snapkv", "kv_eviction_prompt_interval": 256}, 256),
        ("layer-probe", {"kv_eviction": "snapkv", "kv_eviction_prompt_interval": 512}, 512),
        ("snapkv", {"kv_eviction": "adakv"}, 512),  # the server's own looks through a window, too
    ],
)
def test_windows_are_not_moved_away_from_the_question_unless_that_is_asked_for(
    server: str, own: dict[str, Any], interval: int
) -> None:
    cut = EvictionConfig(method=server, prompt_interval=512, allow_override=OVERRIDE_NAMES)
    assert request_config(cut, own).prompt_interval == interval


def test_one_entry_and_the_whole_prompt_are_different_budgets() -> None:
    one = EvictionConfig(method="adakv-perturb", budget=1)
    with pytest.raises(RequestError, match=r"kv_eviction_budget = 1\.0 is not allowed"):
        request_config(one, {"kv_eviction_budget": 1.0})
    for budget in (1, 1.0, 1):
        got = request_config(OPEN, {"kv_eviction_budget": budget}).budget
        assert type(got) is type(budget)


@pytest.mark.parametrize(
    ("extra_args", "reason", "message"),
    [
        ({"kv_eviction": "snapkw"}, "invalid_value", "kv_eviction = 'snapkw' is not accepted"),
        ({"kv_eviction": None}, "invalid_value", "kv_eviction = None"),
        ({"kv_eviction": ["adakv"]}, "invalid_value", "kv_eviction = "),
        ({"kv_eviction_budget": 0}, "invalid_value", "kv_eviction_budget = 0 is not accepted"),
        ({"kv_eviction_budget": "x"}, "invalid_value", "kv_eviction_budget = 'x'"),
        ({"kv_eviction_budget": 1.5}, "invalid_value", "write an integer"),
        ({"kv_eviction_budget": True}, "invalid_value", "kv_eviction_budget = True"),
        ({"kv_eviction_budget": [1]}, "invalid_value", "kv_eviction_budget = "),
        ({"kv_eviction_window": 8}, "unknown_key", "accepted keys: kv_eviction, kv_eviction_bud"),
        ({"kv_eviction_budgets": 8}, "unknown_key", "did you mean 'kv_eviction_budget'?"),
        ({"kv_evict": "none"}, "unknown_key", "did you mean 'kv_eviction'?"),
        ({"kveviction": "none"}, "unknown_key", "unknown key 'kveviction'"),
        ({"kv-eviction": "none"}, "unknown_key", "did you mean 'kv_eviction'?"),
        ({"kv_eivction": "none"}, "unknown_key", "did you mean 'kv_eviction'?"),
        ({"kvEvictionBudget": 64}, "unknown_key", "did you mean 'kv_eviction_budget'?"),
        ({"eviction_budget": 64}, "unknown_key", "did you mean 'kv_eviction_budget'?"),
    ],
)
def test_refusals_name_the_key_as_the_client_wrote_it(
    extra_args: dict[str, Any], reason: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        request_config(OPEN, extra_args)
    assert message in str(caught.value)
    assert caught.value.reason == reason
    assert isinstance(caught.value, ConfigError)
    assert " budget = " not in str(caught.value)


def test_a_change_that_is_not_allowed_says_what_would_allow_it() -> None:
    with pytest.raises(RequestError, match="--kv-eviction-allow-override method") as caught:
        request_config(SERVER, {"kv_eviction": "none"})
    assert "keeps 'adakv-perturb'" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["kv_transfer_params", "kv_connector", "kv_selection", "method", "x", "", "kv_" * 10**6]
)
def test_other_peoples_keys_are_theirs(key: str) -> None:
    assert request_config(SERVER, {key: 1}) is SERVER
    refuse_stray_settings({key: 1, "extra_body": [{key: {key: 1}}]}, "vllm_xargs")


def test_more_keys_than_anybody_sends_are_refused_before_they_are_looked_at() -> None:
    class Keys(dict[str, int]):
        def items(self) -> Any:
            raise AssertionError("looked at")

    enough = {f"key {i}": 0 for i in range(MAX_KEYS)}
    assert request_config(SERVER, enough) is SERVER
    many_keys = Keys(enough | {"one more": 0})
    with pytest.raises(RequestError, match="65 keys of vllm_xargs are too many") as caught:
        request_config(SERVER, many_keys)
    assert (caught.value.key, caught.value.reason) == ("", "too_many_keys")
    assert planned_config(SERVER, sampling(many_keys)).method == "none"
    with pytest.raises(RequestError, match="65 unknown fields are too many"):
        refuse_stray_settings(many_keys, "vllm_xargs")

    inside = {"x": [{f"kv {i}": 0 for i in range(MAX_KEYS + 1)}]}
    with pytest.raises(RequestError, match="65 names of unknown fields are too many"):
        refuse_stray_settings(inside, "vllm_xargs")


@pytest.mark.parametrize("field", ["kv_eviction", "kv_eviction_budget", "kv_evict", "kvEviction"])
def test_settings_beside_vllm_xargs_are_refused_with_where_they_belong(field: str) -> None:
    with pytest.raises(RequestError, match=r'send it as \{"vllm_xargs": \{"kv_eviction') as caught:
        refuse_stray_settings({"other": 1, field: 1}, "vllm_xargs")
    assert (caught.value.key, caught.value.reason) == (field, "unknown_key")


@pytest.mark.parametrize("key", [*REQUEST_KEYS, "kv_evict", "KV-Prefill"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("vllm_xargs", 'send it as {"vllm_xargs": {"kv_'),
        ("sampling_params.extra_args", 'send it as {"sampling_params": {"extra_args": {"kv_'),
        (None, "such a request has the server's settings: leave it out"),
    ],
)
def test_settings_inside_of_what_nobody_reads_are_refused(
    key: str, place: str | None, message: str
) -> None:
    for fields, path in (
        ({"extra_body": {"vllm_xargs": {key: 1}}}, f"extra_body.vllm_xargs.{key}"),
        ({"a": 1, "b": [[{"c": {}}, {key: 1}]]}, f"b.{key}"),
    ):
        with pytest.raises(RequestError) as caught:
            refuse_stray_settings(fields, place)
        assert message in str(caught.value)
        assert (caught.value.key, caught.value.is_field) == (path, True)


@many
@given(servers, asked, st.integers(0, 500))
def test_only_a_request_for_one_token_drops_nothing_for_that(
    server: EvictionConfig, own: dict[str, Any], interval: int
) -> None:
    server = cut_in_prompts(server, own, interval)
    planned = planned_config(server, sampling(own))
    if planned.context is None:
        assert planned_config(server, sampling(own, 1)).method == "none"
    else:  # its one token reads what is retained of the context
        assert planned_config(server, sampling(own, 1)) == planned
    assert planned_config(server, sampling(own, 2)) == planned


@many
@given(servers, asked, st.integers(0, 500))
def test_log_probabilities_of_a_prompt_are_those_of_the_full_cache(
    server: EvictionConfig, own: dict[str, Any], interval: int
) -> None:
    server = cut_in_prompts(server, own, interval)
    planned = planned_config(server, sampling(own))
    at_its_end = planned.model_dump() | {"context": None, "prompt_interval": 0}
    exact = planned_config(server, sampling(own, prompt_logprobs=0))
    assert not planned.enabled or exact.model_dump() == at_its_end


@pytest.mark.parametrize("own", [{"kv_eviction": "snapkv"}, {"kv_eviction_budget": 64}])
def test_a_beam_search_that_asks_for_eviction_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"no effect with use_beam_search.*full cache") as caught:
        refuse_beam_settings(OPEN, own)
    assert caught.value.key in own
    assert caught.value.reason == "unsupported"


def test_a_beam_search_that_asks_for_a_sparse_prefill_is_refused() -> None:
    server = EvictionConfig(method="adakv-perturb", allow_override=OVERRIDE_NAMES)
    own = {"kv_eviction": "none", "kv_prefill": "critiprefill"}
    with pytest.raises(RequestError, match="kv_prefill has no effect with use_beam_search"):
        refuse_beam_settings(server, own)
    sparse = EvictionConfig.parse(
        {"method": "adakv-perturb", "prefill": "critiprefill", "allow_override": OVERRIDE_NAMES}
    )
    refuse_beam_settings(sparse, own | {"kv_prefill": "dense"})


@many
@given(servers, st.integers(1, 5000))
def test_the_steps_of_a_beam_search_keep_the_full_cache_whatever_the_server_allows(
    server: EvictionConfig, prompt_interval: int
) -> None:
    server = server.model_copy(update={"prompt_interval": prompt_interval})
    server = server.model_copy(update={"prefill": "critiprefill"})
    copied = dict(FULL_CACHE)  # what other processes get
    for extra_args in (FULL_CACHE, copied):
        config = planned_config(server, sampling(extra_args, 1))
        assert (config.enabled, config.of(Prefill).prefill) == (False, "dense")
    assert not request_config(server, FULL_CACHE).enabled
    if "method" not in server.allow_override and server.enabled:
        with pytest.raises(RequestError, match="not allowed"):
            request_config(server, copied)


@pytest.mark.parametrize(
    "own", [None, {}, {"session_id": "a"}, {"kv_eviction": "none", "kv_eviction_budget": 64}]
)
def test_a_beam_search_that_asks_for_none_is_served(own: dict[str, Any] | None) -> None:
    refuse_beam_settings(OPEN, own)


def test_settings_of_a_beam_search_are_checked_like_any_others() -> None:
    with pytest.raises(RequestError, match="'zz' is not accepted"):
        refuse_beam_settings(OPEN, {"kv_eviction": "zz"})
    with pytest.raises(RequestError, match="not allowed"):
        refuse_beam_settings(SERVER, {"kv_eviction": "none"})


@pytest.mark.parametrize("allow_override", [(), ("method",)])
def test_a_method_that_is_measured_off_the_engine_only_is_refused(
    allow_override: tuple[Any, ...],
) -> None:
    server, own = (
        EvictionConfig(method="adakv-perturb", allow_override=allow_override),
        {"kv_eviction": "layer-kvzip"},
    )
    with pytest.raises(RequestError, match="'layer-kvzip' is not served") as caught:
        request_config(server, own)
    assert caught.value.reason == "unsupported"
    assert planned_config(server, sampling(own)).method == "none"


def test_settings_that_exclude_each_other_are_refused_and_drop_nothing() -> None:
    extra_args = {"kv_eviction": "defensivekv", "kv_eviction_decode_budget": 256}
    message = "kv_eviction_decode_budget = 256 is not accepted with kv_eviction = 'defensivekv'"
    server = EvictionConfig(method="adakv-perturb", allow_override=OVERRIDE_NAMES)
    with pytest.raises(RequestError, match=message) as caught:
        request_config(server, extra_args)
    assert caught.value.key in extra_args
    assert caught.value.reason == "unsupported"
    assert not planned_config(server, sampling(extra_args)).enabled


@pytest.mark.parametrize(
    ("field", "value"), [("decode_budget", 0), ("decode_budget", 256), ("decode_interval", 64)]
)
def test_a_request_may_ask_for_rounds_or_for_none(field: Any, value: int) -> None:
    server = EvictionConfig(method="adakv-perturb", decode_budget=512, allow_override=(field,))
    got = request_config(server, {f"kv_eviction_{field}": value})
    assert got == server.model_copy(update={field: value})
