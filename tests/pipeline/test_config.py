"""Configuration: layers, overrides, unknown keys, and every shipped file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftloop.pipeline.config import Config, load, shown, without_userinfo
from draftloop.pipeline.demo import demo_config
from draftloop.pipeline.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted((CHECKOUT / "configs").glob("*.toml")), ids=lambda file: file.name)
def test_every_shipped_toml_loads_on_its_own_and_on_base(file: Path) -> None:
    assert isinstance(load([file], []), Config)
    assert isinstance(load([CHECKOUT / "configs/base.toml", file], []), Config)


@pytest.mark.parametrize("file", sorted((CHECKOUT / "configs/deepspeed").glob("*.json")), ids=lambda file: file.name)
def test_every_shipped_deepspeed_file_is_json_with_a_zero_stage(file: Path) -> None:
    assert json.loads(file.read_text())["zero_optimization"]["stage"] in (1, 2, 3)


def test_every_toml_is_named_in_the_configs_readme() -> None:
    readme = (CHECKOUT / "configs/README.md").read_text()
    for file in (CHECKOUT / "configs").glob("*.toml"):
        assert f"`{file.name}`" in readme


def test_later_files_win_over_earlier_ones_and_overrides_over_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("seed = 1\n[train]\nepochs = 1.0\nttt_steps = 2\n")
    second.write_text("[train]\nepochs = 2.0\n")
    config = load([first, second], ["train.ttt_steps=3"])
    assert (config.seed, config.train.epochs, config.train.ttt_steps) == (1, 2.0, 3)


def test_an_unknown_key_is_an_error_that_names_it_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"train\.epoch = 3") as caught:
        load([], ["train.epoch=3"])
    assert "epochs" in str(caught.value.mend)
    assert caught.value.exit_code == 2


def test_a_value_out_of_range_names_key_value_and_rule() -> None:
    with pytest.raises(ConfigError, match=r"train\.ttt_steps = 0"):
        load([], ["train.ttt_steps=0"])


@pytest.mark.parametrize("override", ["train.epochs", "=3", ""])
def test_an_override_without_key_or_value_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match="not key=value"):
        load([], [override])


def test_a_section_replaced_by_a_scalar_is_an_error() -> None:
    with pytest.raises(ConfigError, match="train"):
        load([], ["train=3"])


def test_a_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load([tmp_path / "nowhere.toml"], [])
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        load([broken], [])


def test_the_default_consent_is_deny() -> None:
    assert load([], []).consent.tenants == {}


def test_the_demo_keeps_what_the_user_sets() -> None:
    config = demo_config([], ["loop.auto_promote=false", "demo.max_tokens=9"], None)
    assert (config.loop.auto_promote, config.demo.max_tokens) == (False, 9)


@pytest.mark.parametrize("override", ["train.learning_rate=inf", "agent.tie_margin=inf", "train.betas=[0.9, nan]"])
def test_a_number_that_is_not_finite_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {override.partition('=')[0]} = .*not a finite number"):
        load([], [override])


@pytest.mark.parametrize("seed", [-1, 10**20])
def test_a_seed_that_no_generator_takes_is_an_error(seed: int) -> None:
    with pytest.raises(ConfigError, match="setting seed"):
        load([], [f"seed={seed}"])


def test_an_override_that_smuggles_a_second_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match="more than one value"):
        load([], ["seed=1\nwork='elsewhere'"])


def test_a_binary_file_is_not_toml(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"seed = 1\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load([tmp_path / "bad.toml"], [])


def test_a_work_folder_that_no_database_address_can_name_is_refused() -> None:
    assert load([], ["work='/a b/100% #1/\u65e5\u672c'"]).tracking_uri.endswith("/a b/100% #1/\u65e5\u672c/mlflow.db")
    with pytest.raises(ConfigError, match=r"work = /a\?b"):
        _ = load([], ["work='/a?b'"]).tracking_uri


CANARY = "canary-7f3a"
KAFKA = """
[log]
kind = "kafka"
[log.kafka]
bootstrap = ["127.0.0.1:1"]
[log.kafka.security]
ca_file = "/ca.pem"
"""


def test_what_is_shown_of_a_configuration_holds_no_secret_in_an_odd_place(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"{KAFKA}mechanism = 'OAUTHBEARER'\ntoken_command = ['/bin/get-token', '--secret', '{CANARY}']\n")
    config = load([file], [f'registry.tracking_uri="https://user:{CANARY}@host:5000/path"'])
    values = shown(config)
    assert CANARY not in json.dumps(values)
    assert values["log"]["kafka"]["security"]["token_command"] == ["/bin/get-token", "..."]
    assert values["registry"]["tracking_uri"] == "https://***@host:5000/path"
    plain = load([], ["train.epochs=3"])
    assert shown(plain) == plain.model_dump(mode="json"), "nothing else is changed"


def test_a_login_is_taken_out_of_every_url_of_a_text() -> None:
    told = without_userinfo(f"see http://u:{CANARY}@a/x, ftp://{CANARY}/@b and sqlite:////folder/mlflow.db, me@home")
    assert told == "see http://***@a/x, ftp://***@b and sqlite:////folder/mlflow.db, me@home"


@pytest.mark.parametrize(
    "text",
    [
        f"{KAFKA}username = 'u'\npassword = '{CANARY}'",
        f"{KAFKA}username = 'u'\npassword_env = '{CANARY}'",
        f"{KAFKA}username = 'u'\npassword_file = ['{CANARY}']",
        f"{KAFKA}username = 'u,{CANARY}'\npassword_env = 'X'",
        f"{KAFKA}username = 'u'\npassword_env = 'X'\nmechanism = '{CANARY}'",
        f"{KAFKA}mechanism = 'OAUTHBEARER'\ntoken_command = 'curl -u u:{CANARY} x'",
        f"[log.kafka]\nbootstrap = ['u:{CANARY}@127.0.0.1:9']",
        f"[log.kafka]\nbootstrap = 'u:{CANARY}@127.0.0.1'",
        f"[log.kafka]\nuser = '{CANARY}'",
        f"[log.kafka]\nsecurity = '{CANARY}'",
        f"[log]\nkafka = '{CANARY}'",
        f"log = ['{CANARY}']",
        f"[log.kafak.security]\npassword = '{CANARY}'",
        f"[[kafka]]\npassword = '{CANARY}'",
        f"[log.kafka.security]\npassword = '{CANARY}\n",
        f"uri = 'http://u:{CANARY}@127.0.0.1:9/'",
        f"[train]\nepochs = 'http://u:{CANARY}@127.0.0.1:9/'",
        f"[mlflow]\nuri = ['http://u:{CANARY}@127.0.0.1:9/']",
        f"'http://u:{CANARY}@h' = 3",
    ],
)
def test_a_setting_that_is_wrong_is_told_without_a_secret_that_may_be_in_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load([file], [])
    assert CANARY not in str(error.value)
    assert error.value.__cause__ is None or CANARY not in str(error.value.__cause__)


@pytest.mark.parametrize(
    "override",
    [
        f"log.kafka.security.password={CANARY}",
        f"log.kafka.security.password_env={CANARY}",
        f"log.kafka.security={CANARY}",
        f"={CANARY}",
        f"http://u:{CANARY}@host",
        f"work='x'\npassword='{CANARY}'",
    ],
)
def test_an_override_that_is_wrong_is_told_without_a_secret_that_may_be_in_it(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([], [override])
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("order", [("engine.max_batch=3", "engine=vllm"), ("engine=vllm", "engine.max_batch=3")])
def test_a_sections_bare_word_is_its_kind_and_leaves_its_other_keys(order: tuple[str, str]) -> None:
    engine = load([], order).engine
    assert (engine.kind, engine.max_batch) == ("vllm", 3)


def test_an_unknown_engine_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind = 'tgi'.*'embedded' or 'vllm'"):
        load([], ["engine=tgi"])
