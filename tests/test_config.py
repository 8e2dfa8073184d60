"""The table of settings: parsing, precedence, and the page that is generated from it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from horovod.config import SETTINGS, Config, Setting, doubtful_variables, load, parse, render

ROOT = Path(__file__).resolve().parent.parent


def test_docs_page_is_what_the_table_says() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "scripts" / "environment.py"))["markdown"]()
    assert page == made, "python scripts/environment.py > docs/environment.md"


def test_defaults_without_any_variable() -> None:
    assert load({}) == Config()


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON"])
def test_words_for_yes(word: str) -> None:
    assert load({"HOROVOD_STALL_CHECK_DISABLE": word}).stall_check_disable is True


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF", ""])
def test_words_for_no(word: str) -> None:
    assert load({"HOROVOD_STALL_CHECK_DISABLE": word}).stall_check_disable is False


@pytest.mark.parametrize(
    ("env", "text", "field", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1048576", "fusion_threshold_bytes", 1 << 20),
        ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_threshold_bytes", 0),
        ("HOROVOD_CACHE_CAPACITY", " 7 ", "cache_capacity", 7),
        ("HOROVOD_START_TIMEOUT", "2.5", "start_timeout_s", 2.5),
        ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("HOROVOD_TIMELINE", "/tmp/Trace.json", "timeline", "/tmp/Trace.json"),
    ],
)
def test_values_are_read(env: str, text: str, field: str, value: object) -> None:
    assert getattr(load({env: text}), field) == value


@pytest.mark.parametrize(
    ("env", "text", "said"),
    [
        ("HOROVOD_STALL_CHECK_DISABLE", "maybe", "1/true/yes/on"),
        ("HOROVOD_CACHE_CAPACITY", "1e3", "a whole number"),
        ("HOROVOD_CACHE_CAPACITY", "-1", "at least 0"),
        ("HOROVOD_BUCKET_BYTES", "0", "at least 1"),
        ("HOROVOD_START_TIMEOUT", "nan", "at least 0"),
        ("HOROVOD_START_TIMEOUT", "inf", "at least 0"),
        ("HOROVOD_START_TIMEOUT", "soon", "a number"),
        ("HOROVOD_LOG_LEVEL", "loud", "trace, debug"),
        ("HOROVOD_CYCLE_TIME", "(None,)", "a number"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.5", "at most 1"),
    ],
)
def test_wrong_value_is_an_error_that_names_the_variable(env: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=env) as caught:
        load({env: text})
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)


def test_explicit_argument_beats_environment() -> None:
    environ = {"HOROVOD_BUCKET_BYTES": "100"}
    assert load(environ, bucket_bytes=200).bucket_bytes == 200
    assert load(environ, bucket_bytes=None).bucket_bytes == 100


def test_unknown_override_is_an_error() -> None:
    with pytest.raises(TypeError, match="buckets"):
        load({}, buckets=1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.env)
def test_rendered_default_is_read_back(setting: Setting) -> None:
    assert parse(setting, render(setting.default)) == setting.default


def test_names_flags_and_keys_are_unique() -> None:
    for column in ("env", "flag", "flag_off", "yaml_path", "name"):
        values = [value for s in SETTINGS if (value := getattr(s, column))]
        assert len(values) == len(set(values)), column


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
        ("HOROVOD_LOGLEVEL", "HOROVOD_LOG_LEVEL"),
        ("HOROVOD_STALL_CHECK_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
        ("HOROVOD_HOSTS", None),
        ("HOROVOD_QQQQQQQQ", None),
    ],
)
def test_unknown_variable_gets_the_nearest_name(name: str, meant: str | None) -> None:
    (sentence,) = doubtful_variables({name: "1", "PATH": "/bin"})
    assert name in sentence
    assert (f"did you mean {meant}?" in sentence) if meant else ("did you mean" not in sentence)


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "HOROVOD_SECRET_KEY", "HOROVOD_WITH_PYTORCH"])
def test_names_of_horovod_are_not_unknown(name: str) -> None:
    assert doubtful_variables({name: "1"}) == []


def test_settings_without_effect_are_told_unless_they_have_their_default() -> None:
    (sentence,) = doubtful_variables({"HOROVOD_AUTOTUNE": "1", "HOROVOD_CYCLE_TIME": "5"})
    assert sentence == "without effect in this version (docs/environment.md): HOROVOD_CYCLE_TIME, HOROVOD_AUTOTUNE"
    assert doubtful_variables({"HOROVOD_AUTOTUNE": "0", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) == []


def test_every_setting_of_horovod_without_effect_is_reported() -> None:
    (sentence,) = doubtful_variables({"HOROVOD_THREAD_AFFINITY": "0,1", "HOROVOD_CYCLE_TIME": "3"})
    assert "HOROVOD_THREAD_AFFINITY" in sentence and "HOROVOD_CYCLE_TIME" in sentence
