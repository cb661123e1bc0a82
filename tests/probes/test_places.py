"""Which probe a model uses: a named one, the user's own, one of the package."""

from pathlib import Path

import pytest
import torch

from tests.probes.test_file import FACTS, MODEL
from vllm_kvselect.config import ConfigError
from vllm_kvselect.probes import places
from vllm_kvselect.probes.file import Probe
from vllm_kvselect.probes.places import default_path, find_probe

FINGERPRINT = 5 * "0123456789ab"
OTHER = FINGERPRINT.replace("b", "c")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(places, "_SHIPPED", tmp_path / "shipped")


def write(path: Path, fingerprint: str = FINGERPRINT) -> Path:
    model = MODEL.model_copy(update={"fingerprint": fingerprint})
    Probe(torch.zeros(MODEL.shape), FACTS.model_copy(update={"model": model})).save(path)
    return path


def found(file: Path | None = None) -> Path:
    probe, path = find_probe("some/model", FINGERPRINT, file and str(file))
    assert probe.facts.model.fingerprint == FINGERPRINT
    return path


def test_without_a_probe_the_command_that_makes_one_is_named() -> None:
    write(default_path("model", OTHER))
    with pytest.raises(ConfigError, match=r"no probe of some/model; .*`vllm-kvselect calibrate so"):
        found()


def test_the_users_own_is_found_by_the_weights_whatever_the_model_is_called() -> None:
    write(default_path("another", OTHER))
    own = write(default_path("former-name", FINGERPRINT))
    assert found() == own


def test_the_package_has_some_and_the_users_own_comes_before(tmp_path: Path) -> None:
    shipped = write(tmp_path / "shipped" / default_path("model", FINGERPRINT).name)
    assert found() == shipped
    own = write(default_path("model", FINGERPRINT))
    assert found() == own


def test_a_named_file_comes_before_both(tmp_path: Path) -> None:
    write(default_path("model", FINGERPRINT))
    named = write(tmp_path / "named")
    assert found(named) == named


def test_the_probe_of_other_weights_is_refused(tmp_path: Path) -> None:
    named = write(tmp_path / "named", OTHER)
    with pytest.raises(
        ConfigError,
        match="the probe of small, whose weights are not those of some/model; make another one",
    ):
        found(named)


def test_weights_whose_names_begin_alike_are_told_apart() -> None:
    write(default_path("model", FINGERPRINT), FINGERPRINT[:12] + "other")
    with pytest.raises(ConfigError, match="whose weights are not those of some/model"):
        found()
